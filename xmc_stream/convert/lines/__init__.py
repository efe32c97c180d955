"""Lines of text, plain or compressed: files read by ranges, a compiled parser, and parts that are lines."""
