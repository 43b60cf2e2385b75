"""A merged export: what loads it, and what the user is told of it, with torchvision and without."""

import pytest
import torch
from tiny_families import FAMILIES, ask, load, model_config, picture, randomize
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from trinity_vlm.backbone import Backbone
from trinity_vlm.backbone.export import needs_torchvision, save_merged
from trinity_vlm.backbone.loading import load_processor


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_said_of_torchvision_is_what_happens(family_directory, family, tmp_path):
    """AutoProcessor fails exactly where it is said to; the parts that are said to load do load."""
    backbone = load(family_directory(family))
    randomize(backbone, "policy", 1)
    save_merged(backbone.factors("policy"), model_config(family_directory(family)), tmp_path)
    if needs_torchvision(tmp_path):
        with pytest.raises(ImportError, match=r"[Tt]orchvision"):
            AutoProcessor.from_pretrained(tmp_path)
    else:
        assert hasattr(AutoProcessor.from_pretrained(tmp_path), "image_processor")
    assert AutoTokenizer.from_pretrained(tmp_path).vocab_size == backbone.tokenizer.vocab_size
    image = picture(1).pixels
    found = AutoImageProcessor.from_pretrained(tmp_path)(image, return_tensors="pt")["pixel_values"]
    assert (
        found.shape
        == load_processor(model_config(tmp_path)).image_processor(image, return_tensors="pt")["pixel_values"].shape
    )
    assert AutoModelForImageTextToText.from_pretrained(tmp_path).num_parameters() > 0


def test_the_merged_model_speaks_as_base_and_adapter(family_directory, tmp_path):
    """Log-probabilities of the exported directory, without an adapter, are those of the trained policy."""
    trained = load(family_directory("qwen3_vl"))
    randomize(trained, "policy", 1)
    report = save_merged(trained.factors("policy"), model_config(family_directory("qwen3_vl")), tmp_path)
    assert report.survived > 0.99
    merged = load(tmp_path)

    def logprobs(backbone: Backbone, adapter: str | None) -> torch.Tensor:
        with torch.no_grad():
            batch = backbone.collate([(backbone.encode(ask("How many?", picture(1))), (5, 6, 7))], "right")
            return backbone.completion_logprobs(batch, adapter)

    torch.testing.assert_close(logprobs(merged, None), logprobs(trained, "policy"), atol=1e-4, rtol=0)
    assert (logprobs(merged, None) - logprobs(trained, None)).abs().max() > 0.01
