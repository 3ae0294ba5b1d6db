OPENED = open("/dev/zero")  # noqa: SIM115
