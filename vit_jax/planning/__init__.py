"""Plans a training run before there is a device to run it on: memory, time, cost."""
