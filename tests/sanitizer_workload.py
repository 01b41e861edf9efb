"""What test_sanitizer.py runs under compute-sanitizer: every kernel once, on small odd shapes."""

from __future__ import annotations

import torch

import ikbo


def main() -> None:
    with ikbo.strict():
        for rows, n_users in ((33, 3), (8191, 16000), (20001, 300), (1001, 70000)):
            users = torch.randint(-1, n_users + 1, (rows,), dtype=torch.int32, device="cuda")
            ikbo.group_candidates(users, n_users)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
