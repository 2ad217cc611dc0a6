"""What a training run will need, before there is a device to run it on."""
