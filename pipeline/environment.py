"""Environment variables that every process of ours gets."""

NO_NETWORK = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",  # tasks are forked after the tokenizers library was imported
}
"""Compute nodes have no internet: whatever would ask for it must fail at once instead of waiting."""
