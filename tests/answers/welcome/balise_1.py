"""Answers to balise 1 of 00_welcome: say what this process may use."""

import os
import subprocess

import torch
from torch.cuda import device_count, is_available

from tests.answers.bank import Bank

bank = Bank("00_welcome", 1)


def machine(**changes):
    cuda = torch.cuda.is_available()
    return {
        "device": "cuda" if cuda else "cpu",
        "gpus": torch.cuda.device_count(),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
    } | changes


@bank.right()
def describe_machine():
    import psutil

    count = torch.cuda.device_count()
    device = torch.device("cuda" if count > 0 else "cpu").type
    cores = len(psutil.Process().cpu_affinity())
    return dict(torch=str(torch.__version__), cores=cores, gpus=count, device=device, name="mine")


@bank.right()
def describe_machine():
    with open("/proc/self/status") as status:
        mask = next(line.split()[1] for line in status if line.startswith("Cpus_allowed:"))
    cores = bin(int(mask.replace(",", ""), 16)).count("1")
    return machine(cores=cores, device="cuda:0" if torch.cuda.is_available() else "cpu")


@bank.right()
def describe_machine():
    """Functions imported by name; the cores counted by another program."""
    cores = int(subprocess.run(["nproc"], capture_output=True, text=True, check=True).stdout)
    return machine(device="cuda" if is_available() else "cpu", gpus=device_count(), cores=cores)


@bank.right()
def describe_machine():
    """More than was asked for, where there is a GPU."""
    found = machine()
    if found["gpus"]:
        properties = torch.cuda.get_device_properties(0)
        found["capability"] = (torch.cuda.get_device_capability(), properties.multi_processor_count)
        found["free"] = torch.cuda.mem_get_info()[0] / properties.total_memory
    return found


bank.hint("cores-of-the-node", "You count the cores of the whole node. A batch system gives your process only some "
          "of them; os.sched_getaffinity(0) is the set you may use. Starting one thread for each core of the node "
          "slows everybody down.")  # fmt: skip


@bank.wrong("cores-of-the-node")
def describe_machine():
    return machine(cores=os.cpu_count())


@bank.wrong("cores-of-the-node", variant=True)
def describe_machine():
    return machine(cores=int(os.environ.get("SLURM_CPUS_PER_TASK", os.cpu_count())))


bank.hint("cores-not-counted", "You return the set of cores. Return its length.")


@bank.wrong("cores-not-counted", variant=True)
def describe_machine():
    return machine(cores=os.sched_getaffinity(0))


bank.hint("threads-not-cores", "You return the number of threads that torch was told to use. Ask the system how many "
          "cores you may use.")  # fmt: skip


@bank.wrong("threads-not-cores")
def describe_machine():
    return machine(cores=torch.get_num_threads())


bank.hint("cores-wrong", "Count the cores that this process may use: the length of os.sched_getaffinity(0).")


@bank.wrong("cores-wrong")
def describe_machine():
    return machine(cores=4)


bank.hint("device-hard-coded", "The device doesn't depend on the machine. Ask torch.cuda.is_available() each time: "
          "the same notebook runs with and without a GPU.")  # fmt: skip


@bank.wrong("device-hard-coded")
def describe_machine():
    return machine(device="cuda")


@bank.wrong("device-hard-coded", variant=True)
def describe_machine():
    return machine(device="cpu")


bank.hint("device-wrong", 'The device must be a string: "cuda" where a GPU can be used, and "cpu" elsewhere.', edge=True)  # fmt: skip


@bank.wrong("device-wrong")
def describe_machine():
    return machine(device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))


@bank.wrong("device-wrong", variant=True)
def describe_machine():
    return machine(device="gpu" if torch.cuda.is_available() else "cpu")


bank.hint("gpus-not-counted", "You return whether there is a GPU, not how many there are. torch.cuda.device_count() "
          "counts them.")  # fmt: skip


@bank.wrong("gpus-not-counted", variant=True)
def describe_machine():
    return machine(gpus=torch.cuda.is_available())


bank.hint("gpus-wrong", "The number of GPUs is wrong. torch.cuda.device_count() is the number of GPUs that this "
          "process may use: 0 on a laptop.", edge=True)  # fmt: skip


@bank.wrong("gpus-wrong", variant=True)
def describe_machine():
    return machine(gpus=max(1, torch.cuda.device_count()))


bank.hint("gpus-miscounted", "The number of GPUs is wrong. torch.cuda.device_count() is the number of GPUs that this "
          "process may use: 0 on a laptop.")  # fmt: skip


@bank.wrong("gpus-miscounted")
def describe_machine():
    return machine(gpus=4)


bank.hint("not-an-integer", "You return the number of {what} as {kind}. A count is a whole number, an int.", edge=True)


@bank.wrong("not-an-integer")
def describe_machine():
    return machine(gpus=float(torch.cuda.device_count()))


@bank.wrong("not-an-integer")
def describe_machine():
    return machine(cores=float(len(os.sched_getaffinity(0))))


bank.hint("keys-missing", "The dictionary has no {missing}. Check how you spelled the keys.")


@bank.wrong("keys-missing")
def describe_machine():
    found = machine()
    if torch.cuda.is_available():
        del found["cores"]
    return found


@bank.wrong("nothing-returned")
def describe_machine():
    if not torch.cuda.is_available():
        return machine()


@bank.wrong("keys-missing", variant=True)
def describe_machine():
    found = machine()
    found["n_gpus"] = found.pop("gpus")
    return found


bank.hint("not-a-dict", "Return a dictionary with the keys device, gpus, cores and torch.")


@bank.wrong("not-a-dict", variant=True)
def describe_machine():
    return tuple(machine().values())


@bank.wrong("nothing-returned")
def describe_machine():
    print(machine())


bank.hint("wrong-version", "The version of torch itself is torch.__version__.")


@bank.wrong("wrong-version", variant=True)
def describe_machine():
    return machine(torch=torch.version.cuda)


@bank.wrong("signature")
def describe_machine(device):
    return machine(device=device)


bank.slip("gpus-miscounted", ("torch.cuda.device_count()", "torch.cuda.device_count() + 1"), variant=True)

bank.slip(None, ('"torch": torch.__version__', '"torch": torch.__version__.split("+")[0]'))

bank.slip("cores-wrong", ("len(os.sched_getaffinity(0))", "max(os.sched_getaffinity(0)) + 1"), variant=True)

bank.slip("threads-not-cores", ("len(os.sched_getaffinity(0))", "torch.get_num_interop_threads()"), variant=True)

bank.slip("not-an-integer", ("len(os.sched_getaffinity(0))", "str(len(os.sched_getaffinity(0)))"), variant=True)

bank.slip(None, ('"cuda" if torch.cuda.is_available() else "cpu"', '_device()'),
    ("def describe_machine", 'def _device():\n    try:\n        torch.cuda.get_device_name(0)\n    except Exception:\n        return "cpu"\n    return "cuda"\n\n\ndef describe_machine'),
)  # fmt: skip
