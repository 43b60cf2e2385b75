"""placeholder until the supervised warm-up lands"""


def warmup() -> None: ...
