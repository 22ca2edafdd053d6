"""What is decoded besides the comparison itself: curves over thresholds, and models trained in one way differently."""

from typing import Any

from benchmarks.compare_decoding import Setting

THRESHOLDS = (0.1, 0.3, 0.5, 0.7, 0.9)
DECODERS: dict[str, dict[str, Any]] = {
    "self-correcting": {"algorithm": "self_correcting"},
    "self-correcting, redraft": {"algorithm": "self_correcting", "redraft": True},
    "paper": {"algorithm": "paper"},
}


def _slots(decoder: str, size: int, slot_threshold: float, token_threshold: float) -> Setting:
    decode = {
        "gen_length": 96, "slot_size": size, "slot_threshold": slot_threshold, "token_threshold": token_threshold,
    }  # fmt: skip
    return Setting(DECODERS[decoder] | decode, {"name": "refusion"}, "refusion")


def curve_settings() -> list[Setting]:
    """Both thresholds at one value, for every decoder, with short and with long slots."""
    return [
        _slots(decoder, size, threshold, threshold)
        for size in (8, 32)
        for decoder in DECODERS
        for threshold in THRESHOLDS
    ]


def ablation_settings(name: str) -> list[Setting]:
    """How a model of `compare_systems.ABLATIONS` is decoded, and "refusion", which they are compared with."""
    sizes = (int(name.removeprefix("slots_of_")),) if name.startswith("slots_of_") else (4, 8, 16, 32)
    return [_slots(decoder, size, 0.9, 0.9) for decoder in ("self-correcting", "paper") for size in sizes]
