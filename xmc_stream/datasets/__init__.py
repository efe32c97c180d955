"""What is done with finished stores beside learning from them: verifying, summing up, splitting, selecting features, writing as other files."""
