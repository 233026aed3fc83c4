"""Write a model as a folder that a serving engine loads: the packaged small one, or a config for random weights.

python benchmarks/soak_model.py DIR [--layers N]     SmolLM2-135M, its first layers alone if asked
python benchmarks/soak_model.py DIR --random         config.json of a larger model, for --load-format dummy
"""

import argparse
import json
from pathlib import Path

from serve_sizes import SMALL, config_of


def save_packaged(folder, layers):
    import transformers

    from kvcodec.models.loading import load

    loaded = load("smollm2-135m")
    config = loaded.model.config
    # the weights are float32 by now, and a model that calls itself quantized cannot be saved
    del config.quantization_config
    config.num_hidden_layers = layers or config.num_hidden_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    model = getattr(transformers, type(loaded.model).__name__)(config)
    model.load_state_dict(loaded.model.state_dict(), strict=layers is None)
    model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("folder", type=Path)
    p.add_argument("--layers", type=int, help="the first so many; the head reads what they leave")
    p.add_argument("--random", action="store_true", help="a config alone")
    args = p.parse_args()
    if args.random:
        args.folder.mkdir(parents=True, exist_ok=True)
        (args.folder / "config.json").write_text(json.dumps(config_of(SMALL), indent=1))
    else:
        save_packaged(args.folder, args.layers)


if __name__ == "__main__":
    main()
