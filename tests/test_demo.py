"""The demo's parts, on made-up ratings: the data set itself isn't a test requirement."""

from __future__ import annotations

import sys
from pathlib import Path

import movielens
import pytest
import rank_movies
import torch
from movielens import HISTORY, MovieLens
from ranking_model import RankingModel

USERS, MOVIES, RATINGS = 9, 400, 60


@pytest.fixture
def data() -> MovieLens:
    """Every user rates RATINGS movies; even movies are good, odd ones bad."""
    movie = torch.stack([torch.randperm(MOVIES)[:RATINGS] for _ in range(USERS)])
    genres = torch.rand(MOVIES, 4)
    return MovieLens(
        traits=torch.randint(3, (USERS, 3)),
        titles=[f"Movie {n}" for n in range(MOVIES)],
        years=torch.randint(5, (MOVIES,)),
        genres=genres / genres.sum(1, keepdim=True),
        user=torch.arange(USERS).repeat_interleave(RATINGS),
        movie=movie.flatten(),
        rating=torch.where(movie.flatten() % 2 == 0, 5, 2),
        first=torch.arange(USERS + 1) * RATINGS,
    )


def test_trains_and_ranks_alike_rewritten(data: MovieLens) -> None:
    model = RankingModel(data)
    examples = torch.arange(len(data.rating))
    losses = rank_movies.train(model, data, examples[data.first[data.user] != examples], epochs=40)
    assert losses[-1] < 0.8 * losses[0]

    users = torch.tensor([4, 0, 8])
    history = data.history(users, data.first[users] + torch.tensor([RATINGS, 1, 7]))
    assert history.length.tolist() == [HISTORY, 1, 7]
    cand_to_user = torch.tensor([2, 0, 0, 1, 2, 0, 1])  # unsorted
    program, report = rank_movies.rewrite(model, data)
    assert not report.broadcasts and report.of("replaced by candidate_attention")
    with torch.inference_mode():
        user = model.user_side(users, history)
        candidates = model.candidate_rows(torch.arange(7))
        usual = model(user.per_candidate(cand_to_user), candidates)
        served = program.module()(user=user, candidates=candidates, cand_to_user=cand_to_user)
    assert usual.unique().numel() == 7
    torch.testing.assert_close(served, usual, rtol=0, atol=1e-5)


def test_history_ends_before_its_place_and_stays_with_its_user(data: MovieLens) -> None:
    place = torch.arange(len(data.rating))
    history = data.history(data.user, place)
    for p in (0, 1, HISTORY, RATINGS - 1, RATINGS, RATINGS + 3, len(place) - 1):
        begin = max(int(data.first[data.user[p]]), p - HISTORY)
        n = int(history.length[p])
        assert history.movies[p, :n].tolist() == data.movie[begin:p].tolist()
        assert history.ratings[p, :n].tolist() == data.rating[begin:p].tolist()


def test_movies_to_rank_are_unseen(data: MovieLens) -> None:
    for user in range(USERS):
        movies = rank_movies.draw_unseen(data, user)
        assert movies.unique().numel() == rank_movies.CANDIDATES
        assert not torch.isin(movies, data.movie[data.user == user]).any()


def test_report_demands_more_than_popularity(
    data: MovieLens, capsys: pytest.CaptureFixture[str]
) -> None:
    split = data.split(0.2)
    held_out = (torch.arange(len(data.rating)) >= split[data.user]).nonzero()[:, 0]
    with pytest.raises(SystemExit, match="doesn't beat popularity"):
        rank_movies.report_quality(RankingModel(data).eval(), data, held_out, split)
    assert "popularity: mean rating" in capsys.readouterr().out


def test_auc() -> None:
    scores = torch.tensor([0.1, 0.4, 0.4, 0.8])
    assert rank_movies.auc(scores, torch.tensor([False, False, True, True])) == 3.5 / 4
    assert rank_movies.auc(scores, torch.tensor([True, False, False, False])) == 0
    liked = torch.tensor([False, True, True, True])
    users = torch.tensor([0, 0, 1, 1])  # user 1 liked everything and has no AUC
    assert rank_movies.auc_within_users(scores, liked, users) == 1


def test_reads_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "recbole" / "dataset_example" / "ml-100k"
    folder.mkdir(parents=True)
    (tmp_path / "recbole" / "__init__.py").write_text("raise ImportError('not to be imported')")
    files = {
        "user": "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token\n"
        "7\t24\tM\twriter\t85711\n3\t53\tF\tartist\t94043\n",
        "item": "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"
        "5\tNet, The\t1995\tSci-Fi Thriller\n2\tunkonwn\tunkonwn\tunknown\n",
        "inter": "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
        "3\t5\t4\t300\n7\t2\t1\t200\n3\t2\t2\t100\n",
    }
    for name, text in files.items():
        (folder / f"ml-100k.{name}").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    data = movielens.load()
    assert data.traits.tolist() == [[2, 0, 1], [5, 1, 0]]
    assert data.titles == ["The Net", "unkonwn"]
    assert data.years.tolist() == [16, 0]
    assert data.genres.tolist() == [[0.5, 0.5, 0], [0, 0, 1]]
    assert data.user.tolist() == [0, 1, 1]
    assert data.movie.tolist() == [1, 1, 0]
    assert data.rating.tolist() == [1, 2, 4]
    assert data.first.tolist() == [0, 1, 3]


def test_says_how_to_get_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(FileNotFoundError, match="pip install --no-deps recbole"):
        movielens.load()
