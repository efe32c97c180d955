"""Training one model or several, and what a command would do, before it does it."""
