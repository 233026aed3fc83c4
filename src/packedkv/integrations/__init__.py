"""Integrations with other libraries: one module per library, imported on first use."""
