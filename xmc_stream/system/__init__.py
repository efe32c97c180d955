"""What stands below the store: the process and what surrounds it. Memory, threads of BLAS, files, folders, what one sees."""
