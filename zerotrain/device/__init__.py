"""The kinds of devices that ranks compute on: `kinds.device_of` gives the `Device` of a torch.device."""
