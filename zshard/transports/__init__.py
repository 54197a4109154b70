"""What carries collectives below comm.py's seam: process groups, and memory that ranks share."""
