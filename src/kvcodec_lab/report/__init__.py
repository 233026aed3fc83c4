"""Tables, plots and pages of result files; nothing here runs a model."""
