"""Planning of a training run without its devices: memory, time, cost."""
