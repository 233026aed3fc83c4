"""vLLM served from packed pages: the plugin ``vllm.general_plugins: packedkv``, for vLLM 0.32 and 0.33.

On a GPU::

    vllm serve MODEL --attention-backend CUSTOM --additional-config '{"packedkv": {"preset": "saw-int4"}}'

On a CPU the same without ``--attention-backend``, which that platform does not offer. Without the key ``packedkv`` (see
``options``) the engine is not changed.

vLLM is imported only when it loads the plugin.
"""


def register() -> None:
    """Register the backends with vLLM, which calls this in each of its processes, sometimes more than once."""
    from packedkv.integrations.vllm.plugin import register_backends

    register_backends()
