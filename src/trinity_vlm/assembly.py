"""From a configuration to the parts of a run, built once and handed to the loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trinity_vlm.answers import Matcher
from trinity_vlm.backbone import Backbone
from trinity_vlm.backbone.loading import check_model
from trinity_vlm.config import Config, ImagesConfig
from trinity_vlm.ema import VerifierEma, make_ema
from trinity_vlm.engine.paper_layout import PaperLayoutEngine
from trinity_vlm.engine.protocol import Engine
from trinity_vlm.engine.routed import RoutedEngine
from trinity_vlm.engine.transformers_engine import TransformersEngine
from trinity_vlm.engine.vllm.engine import VllmEngine
from trinity_vlm.engine.vllm.library import check_installed
from trinity_vlm.engine_settings import ENGINE_KINDS, ENGINES_WITH_THEIR_OWN_MODEL
from trinity_vlm.environments import Environment, environment_of
from trinity_vlm.episode import Cast
from trinity_vlm.errors import ImageSourceError
from trinity_vlm.evaluation import load_problems
from trinity_vlm.extensions import load_object
from trinity_vlm.fitting import check_capacity, check_compiler, check_plan, check_share, with_planned_cache
from trinity_vlm.images import ImageStream, open_source
from trinity_vlm.roles import PromptSet, Questioner, Solver, Verifier
from trinity_vlm.sizing import pixel_grid
from trinity_vlm.tracking import check_trackers
from trinity_vlm.trainer import Trainer
from trinity_vlm.types import POLICY, VERIFIER
from trinity_vlm.workers import Workers

PRESET_SOURCE = "images"
"""What the presets of large models have for ``images.source``: a folder that may be there."""


@dataclass(frozen=True, slots=True)
class Players:
    """What can play an episode: the backbone, the roles over it, and the average that the Verifier follows."""

    backbone: Backbone
    cast: Cast
    ema: VerifierEma


@dataclass(slots=True)
class System:
    """Everything a run is made of. ``environment`` is set only when the images' scenes are known."""

    config: Config
    workers: Workers
    backbone: Backbone
    engine: Engine
    cast: Cast
    stream: ImageStream
    trainer: Trainer
    ema: VerifierEma
    environment: Environment | None

    @property
    def images_per_worker(self) -> int:
        return self.config.images.per_step // self.workers.world

    def __enter__(self) -> System:
        return self

    def __exit__(self, *exception: object) -> None:
        self.cast.close()

    def serve(self, version: int) -> None:
        """Put the current policy and the Verifier's average into the engine, as two adapters of one base."""
        self.backbone.set_factors(VERIFIER, self.ema.factors())
        serve_adapters(self.engine, self.backbone, version)


def serve_adapters(engine: Engine, backbone: Backbone, version: int) -> None:
    """Let the engine speak with the backbone's adapters as they are now."""
    for name in (POLICY, VERIFIER):
        engine.load_adapter(name, version, backbone.adapter_state(name))


def check(config: Config, workers: Workers | None = None) -> None:
    """Refuse everything that can be refused short of loading weights; raises as the two checks below."""
    workers = workers or Workers()
    check_settings(config, workers)
    check_machine(config, workers)


def check_settings(config: Config, workers: Workers) -> None:
    """Refuse what no machine could run.

    Raises UserError subclasses: sources that hold nothing, prompts that don't render, import paths that name nothing.
    """
    check_share(config, workers.world)
    check_model(config.model, config.lora)
    PromptSet.load(config.roles.prompts)
    for key in ("questioner", "solver", "advantages"):
        load_object(getattr(config.rewards, key), f"rewards.{key}")
    _check_engines(config)
    load_problems(config.evaluation.model_copy(update={"problems": 1}))
    _check_images(config.images)


def check_machine(config: Config, workers: Workers) -> None:
    """Refuse what this machine certainly can't run; nothing is asked of a hub. `doctor` tells of the same, and more.

    Raises TrainingError, and EngineError for engine.kind=vllm without vLLM.
    """
    if config.engine.kind == "vllm":
        check_installed()
    check_trackers(config.tracking)
    check_compiler(config)
    check_capacity(config)
    check_plan(config, workers.world)


def _check_images(images: ImagesConfig) -> None:
    """Raises ImageSourceError as ``open_source`` does; of a source that was never set it says just that."""
    if images.source == PRESET_SOURCE and not Path(PRESET_SOURCE).exists():
        raise ImageSourceError(
            f"images.source must be set: which images to learn from, for example images.source=photos/ or "
            f"images.source='shards/*.parquet' (it is {PRESET_SOURCE!r}, as in the presets, and no such folder is "
            f"in {Path.cwd()})"
        )
    open_source(images)


def _check_engines(config: Config) -> None:
    engine, verifier = config.engine, config.roles.verifier_engine
    if engine.kind not in ENGINE_KINDS:
        load_object(engine.kind, "engine.kind", ENGINE_KINDS)
    if engine.servers is None and verifier is None:
        return
    from trinity_vlm.engine.openai import check_servers

    if engine.servers is not None:
        check_servers(engine.servers, "engine.servers", context=config.model.context)
    if verifier is not None:
        check_servers(verifier, "roles.verifier_engine")


def open_stream(config: Config, backbone: Backbone, workers: Workers) -> ImageStream:
    """This worker's part of the images, at its beginning, resized once to the backbone's own grid."""
    grid = pixel_grid(backbone.processor, config.model)
    return ImageStream(open_source(config.images), config.images, config.seed, workers.rank, workers.world, grid)


def assemble(config: Config, workers: Workers | None = None) -> System:
    """Load the backbone and build every part. Raises UserError subclasses for what the user can fix."""
    workers = workers or Workers()
    check(config, workers)
    players = open_players(config, workers.world)
    # The engine's own arithmetic in the update: vLLM multiplies with adapters in the model's dtype.
    players.backbone.round_adapters(config.engine.kind in ENGINES_WITH_THEIR_OWN_MODEL)
    return System(
        config=config,
        workers=workers,
        backbone=players.backbone,
        engine=players.cast.engine,
        cast=players.cast,
        stream=open_stream(config, players.backbone, workers),
        trainer=Trainer(players.backbone, config.update, config.steps, workers),
        ema=players.ema,
        environment=environment_of(_sources(config)),
    )


def open_players(config: Config, workers: int = 1) -> Players:
    """The backbone with both adapters at their start, and the three roles over its engine; one of ``workers`` equal
    processes."""
    config = with_planned_cache(config, workers)
    backbone, ema = open_backbone(config)
    return Players(backbone, make_cast(config, _make_engine(config, backbone)), ema)


def open_backbone(config: Config) -> tuple[Backbone, VerifierEma]:
    """The backbone with both adapters at their start, and the average that the Verifier follows; no engine."""
    backbone = Backbone.load(config.model, config.lora, config.seed)
    ema = make_ema(config.ema, backbone.factors(POLICY), config.ema_rank)
    ranks = ema.ranks()
    backbone.add_adapter(VERIFIER, ranks, alpha=float(max(ranks.values())))
    return backbone, ema


def make_cast(config: Config, engine: Engine) -> Cast:
    """The three roles over one engine."""
    prompts = PromptSet.load(config.roles.prompts)
    return Cast(
        questioner=Questioner(prompts, config.roles),
        solver=Solver(prompts, config.roles),
        verifier=Verifier(prompts, config.roles),
        matcher=Matcher(config.matcher),
        engine=engine,
        config=config.roles,
        run_seed=config.seed,
    )


def _make_engine(config: Config, backbone: Backbone) -> Engine:
    """The engine of the run; a Verifier that is another model is asked through its own."""
    own = _own_engine(config, backbone)
    if config.roles.verifier_engine is None:
        return own
    from trinity_vlm.engine.openai import OpenAIEngine

    return RoutedEngine(own, {VERIFIER: OpenAIEngine(config.roles.verifier_engine, "roles.verifier_engine")})


def _own_engine(config: Config, backbone: Backbone) -> Engine:
    if config.engine.servers is not None:
        from trinity_vlm.engine.openai import OpenAIEngine

        return OpenAIEngine(config.engine.servers, "engine.servers", backbone)
    if config.engine.kind == "transformers":
        return TransformersEngine(
            backbone,
            max_batch_sequences=config.engine.max_batch_sequences,
            cuda_graphs=config.engine.cuda_graphs,
        )
    if config.engine.kind == "vllm":
        adapters = config.engine.layout == "adapters"
        sequences = config.engine.max_batch_sequences
        vllm = VllmEngine(backbone, config.model, config.engine.vllm, sequences, adapters=adapters)
        return vllm if adapters else PaperLayoutEngine(vllm, vllm.swap_weights, config.engine.sub_batch)
    return load_object(config.engine.kind, "engine.kind")(backbone, config)


def _sources(config: Config) -> Sequence[str]:
    source = config.images.source
    return (source,) if isinstance(source, str) else source
