"""Every exception this package raises on purpose.

TrinityError
├── UserError            the user can fix it; the command line prints it without a traceback and exits with 2
│   ├── ConfigError      a key, its value and the allowed range
│   ├── ImageSourceError nothing readable where images were expected
│   ├── ModelLoadError   the model directory or hub id can't be loaded
│   └── RunDirectoryError a run directory that is missing, foreign or damaged
├── EngineError          a generation backend failed or was asked for what it can't do
├── TrainingError        the update can't go on (a NaN loss, a failed start-up check)
└── CheckpointError      a checkpoint could not be written or read; the last good one is untouched
"""


class TrinityError(Exception):
    """Base of every deliberate error of this package."""


class UserError(TrinityError):
    """Something the user can fix; its text says what was found, what is allowed and what to do next."""


class ConfigError(UserError):
    """A configuration key holds a value outside its range, or keys contradict each other."""


class ImageSourceError(UserError):
    """An image source is missing, empty or holds nothing that can be decoded."""


class ModelLoadError(UserError):
    """A model or processor can't be loaded from the given path or hub id."""


class RunDirectoryError(UserError):
    """A run directory is missing, belongs to something else or is damaged."""


class EngineError(TrinityError):
    """A generation engine failed, or was asked for something it can't do."""


class TrainingError(TrinityError):
    """The update can't continue: a non-finite loss, a failed start-up check, or a machine that can't run it."""


class CheckpointError(TrinityError):
    """A checkpoint could not be written or read; the last complete one is left as it was."""
