"""``kvcodec.models.load`` under the name it had before ``kvcodec_lab`` was split off."""

from kvcodec_lab.models import LoadedModel, SampleText, load, load_text

__all__ = ["LoadedModel", "SampleText", "load", "load_text"]
