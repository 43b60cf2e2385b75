"""Supervised training on (prompt, completion) pairs: the format warm-up (A.1) and the embedded checkpoint's build."""

from trinity_vlm.supervised.examples import ExampleSource, SupervisedExample
from trinity_vlm.supervised.optimizer import Schedule
from trinity_vlm.supervised.training import Progress, SupervisedSettings, train_supervised

__all__ = ["ExampleSource", "Progress", "Schedule", "SupervisedExample", "SupervisedSettings", "train_supervised"]
