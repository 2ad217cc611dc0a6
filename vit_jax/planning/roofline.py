def find_machine(*a):
    pass


def estimate(*a):
    pass
