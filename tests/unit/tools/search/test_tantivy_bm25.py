"""The embedded BM25 index: what it finds, when it is built, what it refuses."""

from __future__ import annotations

import gzip
import json
import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_r1.tools.search import tantivy_bm25
from agent_r1.tools.search.corpus import ENGLISH_STOP_WORDS, Passage, read_passages, survey
from agent_r1.tools.search.tantivy_bm25 import is_current, open_index

PASSAGES = [
    {"id": "p0", "title": "Ada Lovelace", "text": "Ada Lovelace was born in London in 1815."},
    {"id": "p1", "title": "London", "text": "London is the capital of England."},
    {"id": "p2", "title": "Charles Babbage", "text": "He designed engines and ran a workshop."},
]


def write_corpus(path: Path, passages: list[dict[str, str]] | None = None) -> Path:
    lines = [json.dumps(p, ensure_ascii=False) for p in passages or PASSAGES]
    data = ("\n".join(lines) + "\n").encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def ids(path: Path, query: str, top_k: int = 3) -> list[str]:
    index = open_index(path)
    return [hit.passage.id for hit in index.search([query], top_k)[0]]


def builds(caplog: pytest.LogCaptureFixture) -> int:
    return sum("index build finished" in record.message for record in caplog.records)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus.jsonl")


def test_passages_come_back_whole_and_best_first(corpus: Path):
    hits = open_index(corpus).search(["Where was Ada Lovelace born?"], 3)[0]
    assert hits[0].passage.model_dump() == PASSAGES[0]
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)


def test_title_words_count_and_words_are_stemmed(corpus: Path):
    assert ids(corpus, "babbage") == ["p2"]
    assert ids(corpus, "engine designs") == ["p2"]  # engines, designed


def test_a_possessive_is_the_word_itself(tmp_path: Path):
    # As Lucene's `english` analyzer has it: king's is king, and s is no word of either.
    corpus = write_corpus(
        tmp_path / "c.jsonl",
        [
            {"id": "a", "title": "x", "text": "the King's mother"},
            {"id": "b", "title": "x", "text": "s 's-Hertogenbosch"},
        ],
    )
    assert ids(corpus, "king") == ["a"]
    assert ids(corpus, "dog\u2019s kings") == ["a"]
    assert ids(corpus, "s") == ["b"]


def test_decomposed_letters_are_found_as_composed_ones(tmp_path: Path):
    corpus = write_corpus(tmp_path / "c.jsonl", [{"id": "a", "title": "x", "text": "cafe\u0301"}])
    (hit,) = open_index(corpus).search(["caf\u00e9"], 1)[0]
    assert hit.passage.text == "cafe\u0301"  # kept as it came


UNSPACED = {
    "ja": "東京都は日本の首都であり、人口は約千四百万人である。",
    "zh": "长江是中国最长的河流。全长约六千三百公里。",
    "zh2": "黄河是中国第二长的河流。2019年",
    "th": "กรุงเทพมหานครเป็นเมืองหลวงของประเทศไทย น้ำ",
    "ko": "서울은 대한민국의 수도이다.",
    "lo": "ນະຄອນຫຼວງວຽງຈັນ",
    "km": "ភ្នំពេញជារាជធានី",
    "my": "ရန်ကုန်မြို့",
}


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("日本の首都", "ja"),
        ("首都はどこ", "ja"),
        ("人口", "ja"),
        ("口", "ja"),
        ("中国最长的河流", "zh"),
        ("黄河", "zh2"),
        ("2019", "zh2"),
        ("เมืองหลวง", "th"),
        ("น้ำ", "th"),
        ("수도", "ko"),
        ("대한민국 수도는", "ko"),
        ("ວຽງຈັນ", "lo"),
        ("រាជធានី", "km"),
        ("ရန်ကုန်", "my"),
    ],
)
def test_texts_without_blanks_between_words_are_found(tmp_path: Path, query: str, found: str):
    corpus = write_corpus(
        tmp_path / "c.jsonl",
        [*PASSAGES, *({"id": name, "title": "x", "text": text} for name, text in UNSPACED.items())],
    )
    assert ids(corpus, query)[0] == found


WIDTHS = {
    "half": "\uff76\uff9e\uff97\uff7d\u306e\u9774",  # as below, of half width
    "full": "ガラスの靴",
    "latin": "\uff21\uff22\uff23\u3000\uff12\uff10\uff11\uff19",  # of full width
    "plain": "abc 2019",
    "ligature": "of\ufb01ce",
    "letters": "office",
}


@pytest.mark.parametrize(
    ("one", "other"),
    [("half", "full"), ("latin", "plain"), ("ligature", "letters")],
)
def test_letters_of_other_widths_and_forms_are_found_as_their_usual_ones(
    tmp_path: Path, one: str, other: str
):
    passages = [{"id": name, "title": "x", "text": WIDTHS[name]} for name in (one, other)]
    corpus = write_corpus(tmp_path / "c.jsonl", [*PASSAGES, *passages])
    for query in (one, other):
        assert sorted(ids(corpus, WIDTHS[query])[:2]) == sorted([one, other])
        (first, *_), *_ = open_index(corpus).search([WIDTHS[query]], 1)
        assert first.passage.text in WIDTHS.values()  # kept as it came


def test_is_current_says_whether_a_folder_holds_the_index(corpus: Path):
    folder = corpus.parent / "index"
    assert not is_current(corpus, folder)
    open_index(corpus, folder)
    assert is_current(corpus, folder)
    write_corpus(corpus, PASSAGES[:2])
    assert not is_current(corpus, folder)


def test_scores_are_bm25(tmp_path: Path):
    # By hand, k1 = 1.2, b = 0.75, N = 2, df = 1: idf = ln(1 + (2 - 1 + 0.5) / (1 + 0.5)) = ln 2.
    # Both documents have 2 words, so the length norm is 1: score = ln 2 * 2.2 * 1 / (1 + 1.2).
    corpus = write_corpus(
        tmp_path / "c.jsonl",
        [{"id": "a", "title": "x", "text": "word"}, {"id": "b", "title": "x", "text": "other"}],
    )
    (hit,) = open_index(corpus).search(["word"], 5)[0]
    assert hit.score == pytest.approx(math.log(2), rel=1e-5)


def test_a_repeated_query_word_counts_again(corpus: Path):
    index = open_index(corpus)
    once, twice = index.search(["capital", "capital capital"], 1)
    assert twice[0].score == pytest.approx(2 * once[0].score, rel=1e-5)


def test_the_33_stop_words_match_nothing(corpus: Path):
    assert len(set(ENGLISH_STOP_WORDS)) == 33
    assert ids(corpus, " ".join(ENGLISH_STOP_WORDS)) == []


@pytest.mark.parametrize(
    "query",
    ['"unbalanced', "a AND (b OR", "title:x^2~", '+-&&||!(){}[]^"~*?:\\/', "\x00", "", "漢字"],
)
def test_no_text_is_query_syntax(corpus: Path, query: str):
    assert ids(corpus, query) == []
    assert ids(corpus, f"{query} capital") == ["p1"]


def test_ties_keep_the_order_of_the_corpus(tmp_path: Path):
    same = [{"id": f"p{n:03}", "title": "t", "text": "same words"} for n in range(200)]
    corpus = write_corpus(tmp_path / "c.jsonl", same)
    assert ids(corpus, "same words", 4) == ["p000", "p001", "p002", "p003"]


def test_gzip_corpora_are_read(tmp_path: Path):
    corpus = write_corpus(tmp_path / "corpus.jsonl.gz")
    assert ids(corpus, "capital") == ["p1"]


def test_the_index_is_built_once(corpus: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    first = open_index(corpus)
    second = open_index(corpus)
    assert builds(caplog) == 1
    assert first.fingerprint == second.fingerprint
    assert second.num_passages == 3


def test_a_touched_corpus_is_not_built_again_and_a_changed_one_is(
    corpus: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    before = open_index(corpus).fingerprint
    os.utime(corpus, ns=(1, 1))
    assert open_index(corpus).fingerprint == before
    assert builds(caplog) == 1
    changed = [PASSAGES[0] | {"text": "Ada wrote notes."}, *PASSAGES[1:]]
    write_corpus(corpus, changed)
    assert open_index(corpus).fingerprint != before
    assert builds(caplog) == 2
    assert ids(corpus, "notes") == ["p0"]


def test_other_settings_build_again(
    corpus: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    caplog.set_level(logging.INFO)
    index_dir = corpus.parent / "index"
    before = open_index(corpus, index_dir).fingerprint
    monkeypatch.setattr("agent_r1.tools.search.tantivy_bm25.SETTINGS", {"format": 2})
    assert open_index(corpus, index_dir).fingerprint != before
    assert builds(caplog) == 2


def test_what_a_killed_build_left_is_replaced(corpus: Path):
    index_dir = corpus.parent / "index"
    leftover = corpus.parent / "index.building"
    leftover.mkdir()
    (leftover / "meta.json").write_text("half written")
    index_dir.mkdir()
    (index_dir / "index.json").write_text("{")  # not a finished index either
    assert open_index(corpus, index_dir).num_passages == 3
    assert not leftover.exists()


def numbered(count: int) -> list[dict[str, str]]:
    return [{"id": f"p{n}", "title": f"t{n}", "text": f"word{n} common"} for n in range(count)]


def interrupt_build(corpus: Path, count: int) -> None:
    """Begin the index of a corpus, and be interrupted after so many passages, each committed."""

    def interrupted(path: Path, *, skip: int = 0) -> Iterator[Passage]:
        for number, passage in enumerate(read_passages(path, skip=skip)):
            if number == count:
                raise KeyboardInterrupt
            yield passage

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tantivy_bm25, "_COMMIT_EVERY_S", 0.0)
        patch.setattr(tantivy_bm25, "read_passages", interrupted)
        with pytest.raises(KeyboardInterrupt):
            open_index(corpus)


def test_a_stopped_build_goes_on_where_it_was(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    corpus = write_corpus(tmp_path / "c.jsonl", numbered(9))
    interrupt_build(corpus, 4)
    os.utime(corpus, ns=(1, 1))  # its contents count, not its date
    index = open_index(corpus)
    assert "continues num_passages=4 of=9" in caplog.text
    assert index.num_passages == 9
    found = [index.search([f"word{n}"], 9)[0] for n in range(9)]
    assert [[hit.passage.id for hit in hits] for hits in found] == [[f"p{n}"] for n in range(9)]
    assert open_index(corpus).fingerprint == index.fingerprint
    assert builds(caplog) == 1


def test_a_stopped_build_of_another_corpus_is_not_gone_on_with(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    corpus = write_corpus(tmp_path / "c.jsonl", numbered(9))
    interrupt_build(corpus, 4)
    write_corpus(corpus, numbered(10))
    assert len(open_index(corpus).search(["common"], 99)[0]) == 10
    assert "index build continues" not in caplog.text


def test_a_corpus_that_grows_meanwhile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    corpus = write_corpus(tmp_path / "c.jsonl", numbered(3))

    def surveyed(path: Path, report: object) -> int:
        count = survey(path)
        write_corpus(path, numbered(5))
        return count

    with monkeypatch.context() as patch:
        patch.setattr(tantivy_bm25, "survey", surveyed)
        with pytest.raises(ValueError, match="had 3 passages when its index was begun and 5"):
            open_index(corpus)
    assert open_index(corpus).num_passages == 5


@pytest.mark.parametrize("name", ["c.jsonl", "c.jsonl.gz"])
def test_an_id_that_comes_twice_is_named_with_both_lines(tmp_path: Path, name: str):
    passages = numbered(6)
    passages[4]["id"] = "p1"
    corpus = write_corpus(tmp_path / name, passages)
    with pytest.raises(ValueError, match=r":5: id 'p1' is also that of line 2; give every passage"):
        open_index(corpus)
    assert not list(tmp_path.rglob("*.building"))


def test_ids_of_one_hash_are_not_one_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("agent_r1.tools.search.corpus.hash64", lambda text: len(text))
    assert open_index(write_corpus(tmp_path / "c.jsonl", numbered(5))).num_passages == 5


def test_a_failed_build_leaves_the_old_index(corpus: Path):
    index_dir = corpus.parent / "index"
    open_index(corpus, index_dir)
    good = sorted(path.name for path in index_dir.iterdir())
    corpus.write_text(json.dumps(PASSAGES[0]) + "\n{broken\n")
    with pytest.raises(ValueError, match=r"corpus\.jsonl:2: "):
        open_index(corpus, index_dir)
    assert sorted(path.name for path in index_dir.iterdir()) == good
    assert not (corpus.parent / "index.building").exists()


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{broken", "Invalid JSON"),
        (b"", "the line is empty"),
        (b'{"id": "x", "title": "t"}', "text: Field required"),
        (b'{"id": 7, "title": "t", "text": "x"}', "id: Input should be a valid string"),
        (b'{"id": "x", "title": "t", "text": "x", "url": "u"}', "url: Extra inputs"),
        (b'{"id": "\xff", "title": "t", "text": "x"}', "id|Invalid"),
    ],
)
def test_a_malformed_line_is_named_by_file_and_number(tmp_path: Path, line: bytes, problem: str):
    path = tmp_path / "c.jsonl"
    path.write_bytes(json.dumps(PASSAGES[0]).encode() + b"\n" + line + b"\n")
    with pytest.raises(ValueError, match=rf"c\.jsonl:2: .*({problem})"):
        list(read_passages(path))


def test_lines_may_be_left_out_at_the_beginning(tmp_path: Path):
    path = tmp_path / "c.jsonl"
    path.write_text("not even JSON\n" + json.dumps(PASSAGES[1]) + "\n{broken\n")
    passages = read_passages(path, skip=1)
    assert next(passages).id == "p1"
    with pytest.raises(ValueError, match=r"c\.jsonl:3: "):
        next(passages)


def test_a_cut_gzip_file_is_named(tmp_path: Path):
    path = write_corpus(tmp_path / "c.jsonl.gz")
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(ValueError, match=r"c\.jsonl\.gz:\d+: cannot be read further"):
        list(read_passages(path))


def test_a_missing_and_an_empty_corpus_are_errors(tmp_path: Path):
    with pytest.raises(ValueError, match="does not exist"):
        open_index(tmp_path / "nowhere.jsonl")
    (tmp_path / "empty.jsonl").write_bytes(b"")
    with pytest.raises(ValueError, match="is empty"):
        open_index(tmp_path / "empty.jsonl")


def test_an_index_folder_that_cannot_be_made_names_the_key(corpus: Path):
    (corpus.parent / "file").write_text("")
    with pytest.raises(ValueError, match="set index_dir to a folder"):
        open_index(corpus, corpus.parent / "file" / "index")
