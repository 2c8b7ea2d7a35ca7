"""The kinds of devices for ranks to compute on: `kinds.device_of` gives the `Device` of a torch.device."""
