"""Tables, plots and pages of result rows; no module here runs a model."""
