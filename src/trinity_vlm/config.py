"""Every setting of a run, once: closed, frozen, torch-free. Defaults are the paper's where it gives one (Appendix A).

A run is configured by a preset or a YAML file plus ``key=value`` overrides::

    load_config("tiny", ["steps=20", "update.lr=5e-4"])

Unknown keys, wrong types and impossible combinations raise ConfigError, naming key, value and range,
before any model is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from trinity_vlm.engine_settings import EngineConfig, VerifierEngineConfig
from trinity_vlm.errors import ConfigError
from trinity_vlm.section import (
    AutoSwitch,
    Fraction,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
    Switch,
    explain,
    leaf_keys,
)

PRESET_PACKAGE = "trinity_vlm.presets"
FORMAT_VERSION = 1


class SamplingConfig(Section):
    """How tokens are drawn."""

    temperature: NonNegativeFloat = Field(1.0, description="0 is greedy")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(0.95, description="nucleus mass; 1.0 switches it off")
    top_k: NonNegative = Field(20, description="0 switches it off")


class ModelConfig(Section):
    """The backbone that plays all three roles."""

    path: str = Field(description="directory or hub id of any AutoModelForImageTextToText; 'tiny' is the embedded one")
    revision: str | None = Field(None, description="hub revision; pin it for reproducible runs")
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="auto: bfloat16 on a GPU, else float32")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: the GPU when there is one")
    attention: Literal["sdpa", "eager", "flash_attention_2"] = Field("sdpa", description="attention implementation")
    min_pixels: Positive = Field(256 * 32 * 32, description="images are resized up to at least this many pixels")
    max_pixels: Positive = Field(1024 * 32 * 32, description="and down to at most this many")
    context: Positive = Field(20_480, description="prompt plus completion, tokens")

    @model_validator(mode="after")
    def _pixel_bounds(self) -> ModelConfig:
        if self.min_pixels > self.max_pixels:
            raise ValueError(
                f"model.min_pixels={self.min_pixels} is above model.max_pixels={self.max_pixels}; "
                "min_pixels must be at most max_pixels"
            )
        return self


class LoraConfig(Section):
    """The trainable adapter: linear layers of the language model, never embeddings, head, vision tower or merger."""

    rank: Positive = Field(32, description="inner size of the adapter of every layer")
    alpha: PositiveFloat = Field(64.0, description="scaling is alpha / rank")
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="of the supervised warm-up; 0 in a run")
    targets: str | tuple[str, ...] = Field(
        "all-linear",
        description="'all-linear' (of the language model), or names of its linear layers, e.g. [q_proj, v_proj]",
    )


class ImagesConfig(Section):
    """Where unlabeled images come from. Only pixels are read; a label column is never touched."""

    source: str | tuple[str, ...] = Field(
        description="folder, file, glob, parquet shards, WebDataset tars, hub id, 'microcosm:SPLIT' (procedural), or "
        "the import path of your own source 'package.module:factory'"
    )
    column: str = Field("image", description="image column of parquet sources")
    per_step: Positive = Field(16, description="images per outer step over all workers")
    min_side: Positive = Field(28, description="smaller images are skipped, counted as 'too_small'")
    max_decode_pixels: Positive = Field(178_956_970, description="larger images are skipped, counted as 'too_large'")
    max_aspect_ratio: PositiveFloat = Field(100.0, description="longer images are skipped, counted as 'extreme_aspect'")
    max_skip_rate: Fraction = Field(0.2, description="a higher share of unreadable images in a window stops the run")
    thumbnails: Switch = Field("on", description="off keeps every pixel out of the run directory")
    thumbnail_side: Positive = Field(128, description="longer side of a kept thumbnail, pixels")


class RolesConfig(Section):
    """Who is asked what, how often, and with which budget."""

    prompts: str = Field("paper", description="'paper', 'short' (tiny models), or a folder with your own templates")
    candidates: Positive = Field(4, description="G: Questioner completions per image")
    solutions: Positive = Field(4, description="K: Solver completions per selected candidate")
    policy_tokens: Positive = Field(12_288, description="budget of a Questioner or Solver completion")
    verifier_tokens: Positive = Field(8_192, description="budget of a Verifier completion")
    thinking_prefix: str = Field(
        "<think>\n", description="opens the assistant turn of thinking calls; part of the prompt"
    )
    policy_sampling: SamplingConfig = SamplingConfig()
    verifier_sampling: SamplingConfig = SamplingConfig(temperature=0.7, top_p=0.8, top_k=20)
    thinking_sampling: SamplingConfig = Field(SamplingConfig(), description="of the dispute call, which thinks first")
    verifier_retries: NonNegative = Field(0, description="extra tries for an unparsed verdict, disputes aside")
    structured_verdicts: bool = Field(True, description="constrain verdicts to their JSON schema where the engine can")
    justification_chars: Positive = Field(2_000, description="cap of a schema-constrained justification")
    disputes: bool = Field(True, description="let the Verifier settle a consensus against the reference")
    dispute_majority: Annotated[float, Field(gt=0.5, le=1)] = Field(0.75, description="share of formatted solutions")
    dispute_retries: Annotated[int, Field(ge=2)] = Field(2, description="extra tries before the majority is adopted")
    reason_scope: Literal["all", "correct"] = Field(
        "all", description="correct: skip the reasoning score of wrong solutions"
    )
    verifier_engine: VerifierEngineConfig | None = Field(
        None, description="another model as Verifier: {kind: openai, urls: [...], model: ...}; unset: the run's own"
    )

    @model_validator(mode="after")
    def _disputes_need_two(self) -> RolesConfig:
        if self.disputes and self.solutions < 2:
            raise ValueError(
                f"roles.solutions={self.solutions} with roles.disputes=true: a consensus needs at least 2 solutions; "
                "set roles.solutions >= 2 or roles.disputes=false"
            )
        return self


class MatcherConfig(Section):
    """The rule tiers of answer matching (A.3)."""

    relative_tolerance: Annotated[float, Field(ge=0, lt=1)] = Field(0.01, description="of the reference")
    integer_exact: bool = Field(True, description="unequal integers within the tolerance are ambiguous, not equal")
    symbolic: bool = Field(True, description="let killable workers compare LaTeX expressions")
    symbolic_deadline: PositiveFloat = Field(2.0, description="seconds before a symbolic comparison is killed")


class RewardsConfig(Section):
    """Coefficients of Eqs. (1) and (2), and the functions that apply them."""

    alpha_q: NonNegativeFloat = Field(0.3, description="weight of the discounted difficulty")
    beta_q: NonNegativeFloat = Field(0.7, description="weight of the challenge")
    rho_f: NonNegativeFloat = Field(0.5, description="penalty of a malformed candidate")
    w_c: NonNegativeFloat = Field(0.5, description="weight of correctness")
    w_r: NonNegativeFloat = Field(0.3, description="weight of reasoning, given correctness")
    w_f: NonNegativeFloat = Field(0.2, description="weight of the Solver format")
    questioner: str = Field("trinity_vlm.rewards:questioner_rewards", description="import path of Eq. (1)")
    solver: str = Field("trinity_vlm.rewards:solver_rewards", description="import path of Eq. (2)")
    advantages: str = Field("trinity_vlm.advantages:group_advantages", description="import path of the advantage rule")


class UpdateConfig(Section):
    """The GSPO update (Eq. 3) and its optimizer (A.2)."""

    lr: PositiveFloat = Field(1e-5, description="highest learning rate of AdamW: reached after the warm-up")
    weight_decay: NonNegativeFloat = Field(0.1, description="of AdamW")
    beta1: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="of AdamW, for the mean of gradients")
    beta2: Annotated[float, Field(ge=0, lt=1)] = Field(0.999, description="of AdamW, for the mean of their squares")
    warmup_steps: NonNegative = Field(5, description="outer steps of linear rise to lr, before a cosine to 0")
    max_grad_norm: PositiveFloat = Field(1.0, description="longer gradients are scaled down to this norm")
    clip_low: PositiveFloat = Field(
        3e-4, description="ratio is clipped at 1 - clip_low; GSPO's are this small on purpose"
    )
    clip_high: PositiveFloat = Field(4e-4, description="and at 1 + clip_high")
    regularizer: NonNegativeFloat = Field(0.10, description="weight of the old-policy term of Eq. (3)")
    updates_per_step: Positive = Field(1, description="optimizer updates one step's rollouts are split into")
    old_logprobs: Literal["recomputed", "engine"] = Field("recomputed", description="who gives those of Eq. (3)")
    loss_reduction: Literal["global", "per_worker"] = Field("global", description="per_worker is the paper's")
    schedule: Literal["joint", "alternating"] = Field("joint", description="alternating freezes one role at a time")
    alternate_every: Positive = Field(1, description="outer steps before the other role's turn")
    importance_cap: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = Field(
        None, description="weigh a rollout by min(its probability ratio of trainer to engine, this); unset: by 1"
    )
    tokens_per_microbatch: Positive = Field(16_384, description="padded tokens of one forward-backward pass")
    gradient_checkpointing: AutoSwitch = Field(
        "auto", description="recompute activations in the backward pass; auto: where a row would not fit the GPU"
    )
    compile_layers: bool = Field(True, description="on a GPU: compile the decoder layers of the update")
    overlap: AutoSwitch = Field(
        "auto",
        description="run the backward passes of finished episodes while others generate; auto: where the engine has "
        "a model of its own",
    )


class EmaConfig(Section):
    """The Verifier: phi <- alpha phi + (1 - alpha) theta on merged weights."""

    kind: Literal["factored", "dense", "none", "frozen"] = Field(
        "factored", description="none: the current policy verifies; frozen: the initial one"
    )
    alpha: Fraction = Field(0.999, description="share of the Verifier that a step keeps; 1: it never moves")
    rank: Positive | None = Field(None, description="of the factored delta; unset: twice lora.rank")
    error_bound: PositiveFloat = Field(1e-3, description="relative truncation error per step above which a run warns")


class CheckpointConfig(Section):
    """What is kept to resume from."""

    every: Positive = Field(10, description="outer steps between checkpoints")
    keep_last: Positive = Field(2, description="the latest checkpoints kept; the best one is kept besides")
    keep_every: NonNegative = Field(0, description="additionally keep every m-th step; 0: none")


class EvaluationConfig(Section):
    """In-training evaluation of the Solver on held-out problems with known answers."""

    source: str | None = Field(None, description="'microcosm:SPLIT' or a jsonl of image, question, answer; unset: none")
    problems: Positive = Field(1024, description="problems taken from the source, at most")
    every: NonNegative = Field(0, description="outer steps between evaluations; 0: only before and after")
    tokens: Positive = Field(1024, description="budget of a Solver completion")
    greedy: bool = Field(True, description="false: sample as in training")


class TrackingConfig(Section):
    """Where metrics go besides metrics.jsonl."""

    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = Field((), description="each needs its extra")
    project: str = Field("trinity-vlm", description="name under which wandb and trackio file the run")


class Config(Section):
    """A whole run."""

    steps: Positive = Field(300, description="outer steps")
    seed: int = Field(0, description="of all that is drawn: adapters' start, order of images, tokens")
    run_dir: str | None = Field(None, description="unset: runs/<preset>-<date>-<time>")
    dry_run: bool = Field(False, description="check settings and prompts, look for images, then end as doctor does")
    model: ModelConfig
    images: ImagesConfig
    roles: RolesConfig = RolesConfig()
    matcher: MatcherConfig = MatcherConfig()
    rewards: RewardsConfig = RewardsConfig()
    lora: LoraConfig = LoraConfig()
    update: UpdateConfig = UpdateConfig()
    ema: EmaConfig = EmaConfig()
    engine: EngineConfig = EngineConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    tracking: TrackingConfig = TrackingConfig()

    @property
    def ema_rank(self) -> int:
        return self.ema.rank or 2 * self.lora.rank

    @model_validator(mode="after")
    def _no_dropout(self) -> Config:
        if self.lora.dropout > 0:
            raise ValueError(
                f"lora.dropout={self.lora.dropout}: it must be 0 in a run (A.2); with dropout the update would not see "
                "the log-probabilities that the completions were drawn from"
            )
        return self

    @model_validator(mode="after")
    def _one_correction(self) -> Config:
        if self.update.importance_cap is not None and self.update.old_logprobs == "engine":
            raise ValueError(
                f"update.importance_cap={self.update.importance_cap} with update.old_logprobs=engine: the ratio of "
                "Eq. (3) then holds the difference already; unset one of them"
            )
        return self

    @model_validator(mode="after")
    def _can_overlap(self) -> Config:
        if self.update.overlap != "on":
            return self
        if self.engine.kind == "transformers":
            raise ValueError(
                "update.overlap=on with engine.kind=transformers: it generates with the very model that trains; "
                "use update.overlap=auto or an engine with a model of its own"
            )
        if self.update.updates_per_step > 1:
            raise ValueError(
                f"update.overlap=on with update.updates_per_step={self.update.updates_per_step}: only the first of "
                "several updates can begin early; set one of them to its default"
            )
        return self

    @model_validator(mode="after")
    def _budgets_fit(self) -> Config:
        for key in ("policy_tokens", "verifier_tokens"):
            if (value := getattr(self.roles, key)) >= self.model.context:
                raise ValueError(
                    f"roles.{key}={value} leaves no room for a prompt in model.context={self.model.context}; "
                    f"it must be below model.context"
                )
        return self


def preset_names() -> list[str]:
    """Names of the shipped presets."""
    return sorted(
        p.name.removesuffix(".yaml") for p in resources.files(PRESET_PACKAGE).iterdir() if p.name.endswith(".yaml")
    )


def load_config(source: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a preset name or a YAML file, apply ``key=value`` overrides (dotted keys, YAML values), validate.

    Raises ConfigError for an unknown preset, unreadable YAML, an unknown key or a value outside its range.
    """
    values = _read_source(source)
    apply_overrides(values, overrides)
    return build_config(values)


def apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> None:
    """Set each ``key=value`` in plain nested values, in place; raises ConfigError for anything else."""
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key:
            raise ConfigError(f"override {override!r} is not key=value; write for example steps=20 or update.lr=1e-4")
        _set_dotted(values, key.strip(), _parse_value(text))


def build_config(values: Mapping[str, Any]) -> Config:
    """Validate plain values into a Config; raises ConfigError naming each offending key, value and range."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(explain(e, all_keys()) for e in error.errors())) from None


def dump_config(config: Config) -> str:
    """The fully resolved configuration as YAML; ``load_config`` reads it back to an equal Config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _read_source(source: str | Path) -> dict[str, Any]:
    path = Path(source)
    if str(source) in preset_names():
        text = resources.files(PRESET_PACKAGE).joinpath(f"{source}.yaml").read_text()
    elif path.suffix in (".yaml", ".yml") and path.is_file():
        text = path.read_text()
    else:
        raise ConfigError(
            f"{str(source)!r} is neither a preset ({', '.join(preset_names())}) nor a readable .yaml file"
        )
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{source}: expected keys with values at the top level, found {type(values).__name__}")
    return values


def _set_dotted(values: dict[str, Any], key: str, value: Any) -> None:
    *parents, leaf = key.split(".")
    node = values
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"override {key}: {parent} holds the value {child!r}, not a section")
        node = child
    node[leaf] = value


def _parse_value(text: str) -> Any:
    """YAML scalar rules, and 1e-4 as a number (YAML 1.1 wants 1.0e-4)."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return value
        return number if math.isfinite(number) else value
    return value


def all_keys() -> list[str]:
    """Every dotted leaf key of the configuration, in order."""
    return leaf_keys(Config)
