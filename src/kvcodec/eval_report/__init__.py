"""The page of a `kvcodec eval` run: reads the results folder, runs nothing, writes one file of HTML."""
