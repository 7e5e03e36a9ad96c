import math
from itertools import pairwise

from proxy.cli.load_test.workload import Workload


def test_prompts_share_prefixes_and_have_their_own_ends():
    load = Workload(12, 3, prefix_len=20, suffix_len=5, request_rate=math.inf, seed=1)
    prompts = load.prompts("salt")
    prefixes = [prompt.partition("\n\n")[0] for prompt in prompts]
    assert len(set(prompts)) == 12
    assert sorted(map(prefixes.count, set(prefixes))) == [4, 4, 4]
    assert prompts == load.prompts("salt")
    assert not set(prefixes) & {prompt.partition("\n\n")[0] for prompt in load.prompts("other")}


def test_arrivals():
    assert list(Workload(3, 1, 1, 1, math.inf, 0).arrivals()) == [0, 0, 0]
    times = list(Workload(2000, 1, 1, 1, 10, 0).arrivals())
    assert all(later > earlier for earlier, later in pairwise(times))
    assert 190 < times[-1] < 210
