"""What is done with finished stores beside learning from them: verifying, summing up, splitting, writing as other files."""
