"""The plugin ``vllm.general_plugins: packedkv``, for vLLM 0.32 and 0.33, which is imported on first use."""


def register() -> None:
    """Register the backends with vLLM, which calls this in each of its processes, sometimes more than once."""
    from packedkv.integrations.vllm.plugin import register_backends

    register_backends()
