"""Everything that measures kvcodec: the command line, models and texts, evaluation, benchmarks, reports."""
