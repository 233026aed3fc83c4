"""Write the packaged small model, its first layers alone if asked, as a folder that a serving engine loads.

python benchmarks/soak_model.py DIR [--layers N]
"""

import argparse
from pathlib import Path


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("folder", type=Path)
    p.add_argument("--layers", type=int, help="the first so many; the head reads what they leave")
    args = p.parse_args()
    import transformers

    from kvcodec_lab.models import load

    loaded = load("smollm2-135m")
    config = loaded.model.config
    # the weights are float32 by now, and a model that calls itself quantized cannot be saved
    del config.quantization_config
    config.num_hidden_layers = args.layers or config.num_hidden_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    model = getattr(transformers, type(loaded.model).__name__)(config)
    model.load_state_dict(loaded.model.state_dict(), strict=args.layers is None)
    model.save_pretrained(args.folder)
    loaded.tokenizer.save_pretrained(args.folder)


if __name__ == "__main__":
    main()
