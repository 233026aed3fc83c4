"""Root of the laboratory's tests, which import each other as ``lab.tests``."""
