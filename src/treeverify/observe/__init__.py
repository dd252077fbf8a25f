"""What validate observes of live verify calls: the bound of two kernels, calls in files, and their replay."""
