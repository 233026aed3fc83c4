"""Pages of eval folders and of bench folders; nothing here runs a model."""
