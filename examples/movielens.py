"""MovieLens-100K as tensors, read from the Python package that carries it."""

from __future__ import annotations

import csv
import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

HISTORY = 50  # how many of a user's latest ratings the model sees
LIKED = 4  # a rating from here on means that the user liked the movie


class History(NamedTuple):
    """What users rated last, oldest first; entries from ``length`` on mean nothing."""

    movies: Tensor  # [U, HISTORY]
    ratings: Tensor  # [U, HISTORY], 1 to 5
    length: Tensor  # int32 [U], at most HISTORY


@dataclass(frozen=True)
class MovieLens:
    """Users and movies are numbered from 0; ratings are sorted by user, then by time."""

    traits: Tensor  # [users, 3]: decade of age, gender, occupation
    titles: list[str]
    years: Tensor  # [movies]: five-year span of the release, 0 if unknown
    genres: Tensor  # float [movies, genres], each row a mean's weights
    user: Tensor  # [ratings]
    movie: Tensor  # [ratings]
    rating: Tensor  # [ratings], 1 to 5
    first: Tensor  # [users + 1]: where each user's ratings begin

    def to(self, device: torch.device) -> MovieLens:
        moved = {n: v.to(device) for n, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **moved)

    def history(self, users: Tensor, before: Tensor) -> History:
        """The users' last ratings before the given places in the list of ratings."""
        begin = torch.maximum(self.first[users], before - HISTORY)
        places = begin[:, None] + torch.arange(HISTORY, device=begin.device)
        places = places.clamp(max=len(self.rating) - 1)
        return History(self.movie[places], self.rating[places], (before - begin).int())

    def split(self, held_out: float) -> Tensor:
        """[users]: the place from which on a user's ratings, the latest ones, are held out."""
        count = self.first.diff()
        return self.first[1:] - (count * held_out).long()


def load() -> MovieLens:
    """Reads the data set.

    Raises:
        FileNotFoundError: the package with the data isn't installed; says how to install it.
    """
    folder = _folder()
    users = _read(folder / "ml-100k.user")
    movies = _read(folder / "ml-100k.item")
    ratings = _read(folder / "ml-100k.inter")
    user_number = {row["user_id"]: n for n, row in enumerate(users)}
    movie_number = {row["item_id"]: n for n, row in enumerate(movies)}
    # Ratings of one second stand in the order of the movies: arbitrary, but the same every time.
    placed = sorted(
        (user_number[r["user_id"]], float(r["timestamp"]), movie_number[r["item_id"]],
         int(float(r["rating"]))) for r in ratings
    )  # fmt: skip
    user = torch.tensor([p[0] for p in placed])
    occupations = sorted({row["occupation"] for row in users})
    genres = sorted({genre for row in movies for genre in row["class"].split()})
    has_genre = torch.tensor([[g in row["class"].split() for g in genres] for row in movies])
    return MovieLens(
        traits=torch.tensor(
            [
                [int(row["age"]) // 10, row["gender"] == "F", occupations.index(row["occupation"])]
                for row in users
            ]
        ),
        titles=[_readable(row["movie_title"]) for row in movies],
        years=torch.tensor([_span(row["release_year"]) for row in movies]),
        genres=has_genre / has_genre.sum(1, keepdim=True).clamp(min=1),
        user=user,
        movie=torch.tensor([p[2] for p in placed]),
        rating=torch.tensor([p[3] for p in placed]),
        first=torch.cat([torch.zeros(1, dtype=torch.long), user.bincount().cumsum(0)]),
    )


def _folder() -> Path:
    package = importlib.util.find_spec("recbole")  # finds it without importing it
    for location in (package and package.submodule_search_locations) or []:
        folder = Path(location) / "dataset_example" / "ml-100k"
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        "MovieLens-100K isn't here. It ships inside the package recbole; install that without its "
        "dependencies:\n    pip install --no-deps recbole==1.2.1"
    )


def _read(path: Path) -> list[dict[str, str]]:
    """Rows of a tab-separated file whose header reads ``name:type``, by name."""
    with path.open(encoding="utf-8", newline="") as file:
        lines = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        names = [column.split(":")[0] for column in next(lines)]
        return [dict(zip(names, line, strict=True)) for line in lines]


def _span(year: str) -> int:
    """Five-year spans from 1920 on are 1, 2, ...; one movie's year is unknown: 0."""
    return (int(year) - 1915) // 5 if year.isdigit() else 0


def _readable(title: str) -> str:
    """'Net, The' -> 'The Net'."""
    name, _, article = title.rpartition(", ")
    articles = ("The", "A", "An", "La", "Le", "Les", "Il", "Der", "Das")
    return f"{article} {name}" if article in articles else title
