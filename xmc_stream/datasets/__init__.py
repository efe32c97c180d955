"""What is done with finished stores beside learning: verifying, summing up, splitting, selecting features, exporting."""
