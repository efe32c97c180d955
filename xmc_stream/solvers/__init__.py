"""The methods: one file each, mathematics on blocks in memory. No paths, no scheduler."""
