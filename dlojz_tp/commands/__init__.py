"""What `python -m dlojz_tp` offers a trainee: lab, doctor, reset, plan."""
