"""Out-of-core streaming library for extreme multi-class and multi-label classification."""
