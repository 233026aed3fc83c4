"""Load of a serving engine over HTTP: clients, metrics, tables."""
