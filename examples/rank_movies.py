"""Trains a plain ranking model on MovieLens-100K, rewrites it with ikbo and ranks movies with both.

Run it with ``make demo``. It ends with an error if the model doesn't beat popularity, if the
rewritten model still copies users, or if the two models disagree.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from itertools import zip_longest
from textwrap import shorten

import movielens
import torch
import torch.nn.functional as F
from movielens import LIKED, MovieLens
from ranking_model import RankingModel
from torch import Tensor, nn
from torch.export import ExportedProgram

import ikbo
from ikbo.rewrite import Report

HELD_OUT = 0.2  # of each user's ratings, the latest ones
EPOCHS, BATCH, LEARNING_RATE = 8, 1024, 1.5e-2
SHORTEST_HISTORY = 5  # a user's first ratings are history only
USERS, CANDIDATES = 15, 70
POPULAR = 300  # candidates are drawn from so many of the most often rated movies
TOLERANCE = 1e-4  # float32 rounding, with room


def main() -> None:
    torch.manual_seed(0)
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    device = torch.device("cuda" if hopper else "cpu")
    data = movielens.load().to(device)
    place = torch.arange(len(data.rating), device=device)
    split = data.split(HELD_OUT)
    held_out = place[place >= split[data.user]]
    enough = place >= data.first[data.user] + SHORTEST_HISTORY
    training = place[enough & (place < split[data.user])]
    print(
        f"MovieLens-100K on {torch.cuda.get_device_name() if hopper else 'the CPU'}: "
        f"{len(data.traits)} users, {len(data.titles)} movies, {len(place):,} ratings.\n\n"
        f"Training on {len(training):,} ratings, each with what its user rated before"
    )
    model = RankingModel(data).to(device)
    train(model, data, training, EPOCHS)
    with torch.inference_mode():
        report_quality(model, data, held_out, split)
    program, report = rewrite(model, data)
    print(f"\n{report}")
    if report.broadcasts:
        sys.exit("The rewritten model still copies users.")
    report.verify()
    with torch.inference_mode():
        report_ranking(model, program.module(), data)


def rewrite(model: RankingModel, data: MovieLens) -> tuple[ExportedProgram, Report]:
    """The model without the copies: it takes each user once, and the user of each candidate."""
    users = torch.arange(4, device=data.user.device)
    with torch.no_grad():
        user = model.user_side(users, data.history(users, data.first[users + 1]))
        candidates = model.candidate_rows(users)
    return ikbo.rewrite(
        model,
        {"user": user, "candidates": candidates},
        contexts={"user": ikbo.Context(inputs=["user"], map="cand_to_user")},
        candidate_inputs=["candidates"],
    )


def train(model: RankingModel, data: MovieLens, examples: Tensor, epochs: int) -> list[float]:
    """Fits the expected rating; the examples are places in the list of ratings. The losses."""
    batches = max(1, len(examples) // BATCH)
    steps = epochs * batches
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    losses: list[float] = []
    model.train()
    for _ in range(epochs):
        for batch in examples[torch.randperm(len(examples))].tensor_split(batches):
            user = model.user_side(data.user[batch], data.history(data.user[batch], batch))
            score = model(user, model.candidate_rows(data.movie[batch]))
            loss = F.binary_cross_entropy_with_logits(score, (data.rating[batch] - 1) / 4)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            show_progress(len(losses), steps, f"loss {statistics.mean(losses[-50:]):.4f}")
    model.eval()
    return losses


def report_quality(model: RankingModel, data: MovieLens, held_out: Tensor, split: Tensor) -> None:
    """Prints AUCs on held-out ratings and exits unless the model beats popularity."""
    users, movies = data.user[held_out], data.movie[held_out]
    liked = data.rating[held_out] >= LIKED
    seen = torch.arange(len(data.rating), device=split.device) < split[data.user]
    count = data.movie[seen].bincount(minlength=len(data.titles)).float()
    total = data.movie[seen].bincount(data.rating[seen].float(), minlength=len(data.titles))
    average = total.sum() / count.sum()
    # Five average ratings more keep a movie that one user loved from the top.
    mean = (total + 5 * average) / (count + 5)
    # The user as of the split: nothing that is held out is in a history.
    scores = torch.cat(
        [
            model(model.user_side(u, data.history(u, split[u])), model.candidate_rows(m))
            for u, m in zip(users.split(BATCH), movies.split(BATCH), strict=True)
        ]
    )
    rankings = {
        "popularity: number of ratings": count[movies],
        "popularity: mean rating": mean[movies],
        "the model": scores,
    }
    print(
        f"\nAUC on the latest {HELD_OUT:.0%} of each user's ratings, held out "
        f"({len(held_out):,}; liked = {LIKED} or 5 stars)"
    )
    aucs = {}
    for name, score in rankings.items():
        aucs[name] = auc(score, liked), auc_within_users(score, liked, users)
        print("  {:<32}{:.3f} overall, {:.3f} within a user".format(name, *aucs[name]))
    *baselines, ours = aucs.values()
    if any(ours[i] <= b[i] for b in baselines for i in range(2)):
        sys.exit("The model doesn't beat popularity.")


def report_ranking(model: RankingModel, rewritten: nn.Module, data: MovieLens) -> None:
    """Ranks unseen movies for some users with both models; exits if they disagree."""
    users = torch.randperm(len(data.traits))[:USERS].to(data.user.device)
    movies = torch.cat([draw_unseen(data, int(user)) for user in users])
    history = data.history(users, data.first[users + 1])
    cand_to_user = torch.arange(USERS, device=users.device).repeat_interleave(CANDIDATES)

    def usual() -> Tensor:
        user = model.user_side(users, history).per_candidate(cand_to_user)
        return model(user, model.candidate_rows(movies))

    def shared() -> Tensor:
        user, candidates = model.user_side(users, history), model.candidate_rows(movies)
        return rewritten(user=user, candidates=candidates, cand_to_user=cand_to_user)

    scores = shared()
    difference = float((scores - usual()).abs().max())
    print(f"\nRanking {CANDIDATES} unseen movies for each of {USERS} users; three of them:")
    for n in range(3):
        print_user(data, int(users[n]), movies.view(USERS, -1)[n], scores.view(USERS, -1)[n])
    user = model.user_side(users, history)
    copies = user.per_candidate(cand_to_user)
    usual_time, shared_time = median_times(usual, shared)
    print(
        f"\nThe same {len(movies)} scores in two ways        user side read         time\n"
        f"  usual: a copy of the user for each     {copies.nbytes() / 1e6:8.2f} MB"
        f"{usual_time * 1e3:10.2f} ms\n"
        f"  rewritten: each user once              {user.nbytes() / 1e6:8.2f} MB"
        f"{shared_time * 1e3:10.2f} ms\n"
        f"  largest difference between the scores: {difference:.1e}\n"
        "User side: the users' embeddings, keys and values. The usual way also writes its copies."
    )
    if not difference <= TOLERANCE:
        sys.exit(f"The two ways differ by more than {TOLERANCE}.")


def draw_unseen(data: MovieLens, user: int) -> Tensor:
    """Some of the most often rated movies among those that the user hasn't rated."""
    count = data.movie.bincount(minlength=len(data.titles))
    count[data.movie[data.first[user] : data.first[user + 1]]] = -1
    popular = count.topk(POPULAR).indices
    return popular[torch.randperm(POPULAR)[:CANDIDATES].to(popular.device)]


def print_user(data: MovieLens, user: int, movies: Tensor, scores: Tensor) -> None:
    """What the user liked last beside what ranks first, with the expected number of stars."""
    rated = slice(int(data.first[user]), int(data.first[user + 1]))
    liked = data.movie[rated][data.rating[rated] == 5][-5:].tolist()
    best = scores.topk(5)
    stars = (1 + 4 * best.values.sigmoid()).tolist()
    ranked = [data.titles[m] for m in movies[best.indices].tolist()]
    print(f"\n  {'User ' + str(user + 1) + ' gave 5 stars to':<40}Top 5 (expected stars)")
    rows = zip_longest([data.titles[m] for m in liked], ranked, stars, fillvalue="")
    for left, title, star in rows:
        print(f"  {shorten(left, 38, placeholder='...'):<40}{title} ({star:.1f})")


def auc(scores: Tensor, liked: Tensor) -> float:
    """How often something liked scores higher than something not liked; a tie counts half."""
    _, rank, ties = scores.unique(return_inverse=True, return_counts=True)
    ranks = (ties.cumsum(0) - (ties - 1) / 2).double()[rank]  # from 1, the mean rank for ties
    n, m = int(liked.sum()), int((~liked).sum())
    return float((ranks[liked].sum() - n * (n + 1) / 2) / (n * m))


def auc_within_users(scores: Tensor, liked: Tensor, users: Tensor) -> float:
    """The mean of the AUCs of each user who liked some and not all."""
    _, counts = users.unique_consecutive(return_counts=True)
    pairs = zip(scores.split(counts.tolist()), liked.split(counts.tolist()), strict=True)
    return statistics.mean(auc(s, of) for s, of in pairs if of.any() and not of.all())


def median_times(*calls: Callable[[], object], rounds: int = 30) -> list[float]:
    """Median seconds of each call, the calls taking turns."""
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds + 5):
        for call, taken in zip(calls, seconds, strict=True):
            _wait()
            begin = time.perf_counter()
            call()
            _wait()
            taken.append(time.perf_counter() - begin)
    return [statistics.median(taken[5:]) for taken in seconds]  # the first five warm up


def _wait() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def show_progress(done: int, total: int, note: str) -> None:
    bar = "#" * (40 * done // total)
    print(f"\r  [{bar:<40}] {done}/{total}  {note}", end="\n" if done == total else "", flush=True)


if __name__ == "__main__":
    main()
