import subprocess
import sys
from pathlib import Path

import pytest

from zaya_tools.errors import SourceError
from zaya_tools.training import corpus


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A folder of 200 small sources, and everything that must be left out."""
    for index in range(200):
        path = tmp_path / f"package{index % 7}" / f"module{index}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"# module {index}\n" + f"value_{index} = 'é{index}'\n" * 300)
    for excluded in (
        "site-packages/a.py",
        "json/tests/b.py",
        "test/c.py",
        "encodings/d.py",
        "pydoc_data/e.py",
        "lib2to3/f.py",
        "idlelib/g.py",
        "turtledemo/h.py",
        "html/entities.py",
        "_sysconfigdata_x.py",
        "__pycache__/i.py",
    ):
        path = tmp_path / excluded
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("EXCLUDED = 1\n")
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9 EXCLUDED\n")
    (tmp_path / "notes.txt").write_text("EXCLUDED")
    return tmp_path


def test_every_file_is_on_exactly_one_side(library: Path) -> None:
    trained = corpus.training_text(library)
    held_out = corpus.held_out_text(library=library)
    sides = [(f"# module {index}\n" in trained, f"# module {index}\n" in held_out) for index in range(200)]
    assert all(trained != held for trained, held in sides)
    assert 1 <= sum(held for _, held in sides) <= 30
    total = sum(len(path.read_text()) for path in library.glob("package*/*.py"))
    assert len(trained) + len(held_out) == total


def test_tables_tests_and_unreadable_files_are_left_out(library: Path) -> None:
    assert "EXCLUDED" not in corpus.training_text(library) + corpus.held_out_text(library=library)


def test_the_split_depends_on_the_path_alone(library: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for path in library.rglob("*.py"):
        copy = elsewhere / path.relative_to(library)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    assert corpus.held_out_text(library=elsewhere) == corpus.held_out_text(library=library)
    assert corpus.training_documents(elsewhere) == corpus.training_documents(library)


def test_these_paths_never_change_sides() -> None:
    held_out = [
        name
        for name in (
            "json/decoder.py",
            "argparse.py",
            "ast.py",
            "multiprocessing/connection.py",
            "typing.py",
            "asyncio/tasks.py",
        )
        if corpus.is_held_out(name)
    ]
    assert held_out == ["multiprocessing/connection.py"]


@pytest.mark.parametrize("size", [0, 1, 777, 20_000])
def test_a_shorter_text_is_the_beginning_of_a_longer_one(library: Path, size: int) -> None:
    text = corpus.held_out_text(size, library)
    assert size - 2 <= len(text.encode()) <= size
    assert corpus.held_out_text(library=library).startswith(text)


def test_a_cut_never_splits_a_character(library: Path) -> None:
    whole = corpus.held_out_text(3000, library).encode()
    cut = whole.index("é".encode()) + 1
    assert corpus.held_out_text(cut, library).encode() == whole[: cut - 1]


def test_little_text_is_spread_over_many_files(library: Path) -> None:
    names = {line.split()[0] for line in corpus.held_out_text(20_000, library).splitlines() if " = " in line}
    assert len(names) >= 4


def test_a_negative_size_is_refused(library: Path) -> None:
    with pytest.raises(ValueError, match="-1"):
        corpus.held_out_text(-1, library)


def test_an_interpreter_without_sources_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no Python sources") as caught:
        corpus.held_out_text(library=tmp_path)
    assert str(tmp_path) in caught.value.message
    assert caught.value.hint


def test_this_interpreter_has_enough_text() -> None:
    assert len(corpus.training_text()) > 1_000_000
    held_out = corpus.held_out_text(100_000)
    assert 99_990 <= len(held_out.encode()) <= 100_000
    assert held_out == corpus.held_out_text(100_000)


def test_importing_the_corpus_loads_nothing_heavy() -> None:
    code = (
        "import sys; import zaya_tools.training.corpus; "
        "print(sorted({'torch', 'transformers', 'numpy', 'safetensors'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
