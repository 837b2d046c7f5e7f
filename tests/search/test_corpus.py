import gzip
import json
import os
import subprocess
import sys
import threading
import tracemalloc
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain, pairwise
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mempo_trl.search import Document, SearchResult, read_corpus
from mempo_trl.search.corpus import cut_into_passages, is_same_corpus


def write(path, *lines):
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return path


class TestDocument:
    @pytest.mark.parametrize(
        ("contents", "title", "text"),
        [
            (
                '"Kathryn Bigelow"\nAn American director.\nBorn 1951.',
                "Kathryn Bigelow",
                "An American director.\nBorn 1951.",
            ),
            ('"Title"\r\ntext', "Title", "text"),
            ('"Title"', "Title", ""),
            ('"Weird Al" Yankovic\ntext', '"Weird Al" Yankovic', "text"),
            ('""Heroes" (song)"\ntext', '"Heroes" (song)', "text"),
            ("Title\ntext", "Title", "text"),
            ("only text", "", "only text"),
            ('"', "", '"'),
            ("", "", ""),
        ],
    )
    def test_title_and_text(self, contents, title, text):
        for document in (Document("1", contents), SearchResult("1", contents, 0.5)):
            assert (document.title, document.text) == (title, text)


class TestReadCorpus:
    @pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.jsonl.gz"])
    def test_reads(self, tmp_path, name):
        record = {"id": "b", "contents": '"Tōkyō"\n東\u2028京', "title": "unused"}
        path = write(
            tmp_path / name, {"id": 7, "contents": "a"}, "", json.dumps(record, ensure_ascii=False), "  \t", ""
        )
        expected = [Document("7", "a"), Document("b", '"Tōkyō"\n東\u2028京')]
        assert list(read_corpus(path)) == expected
        assert list(read_corpus(str(path))) == expected

    def test_byte_order_mark_and_windows_lines(self, tmp_path):
        path = tmp_path / "corpus.jsonl"
        path.write_bytes(b'\xef\xbb\xbf{"id": 1, "contents": "a"}\r\n{"id": 2, "contents": "b"}\r\n')
        assert list(read_corpus(path)) == [Document("1", "a"), Document("2", "b")]

    def test_streams(self, tmp_path):
        path = write(tmp_path / "corpus.jsonl", {"id": 1, "contents": "a"}, "not JSON")
        assert next(read_corpus(path)) == Document("1", "a")

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            ("not JSON", "the line is not JSON"),
            ('{"id": 1, "contents": "cut', "the line is not JSON"),
            ("[" * 100_000, "the line is not JSON"),
            ('{"id": ' + "9" * 5000 + ', "contents": "a"}', "the line is not JSON"),
            ("[1]", "got a list"),
            ('"text"', "got a str"),
            ("null", "got a NoneType"),
            ({"id": 1}, '"contents" is missing'),
            ({"contents": "a"}, '"id" is missing'),
            ({"id": 1, "contents": ["a"]}, '"contents" must be a string, got a list'),
            ({"id": 1, "contents": None}, '"contents" must be a string, got a NoneType'),
            ({"id": None, "contents": "a"}, '"id" must be a string or an integer, got None'),
            ({"id": True, "contents": "a"}, '"id" must be a string or an integer, got True'),
        ],
    )
    @pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.jsonl.gz"])
    def test_bad_line(self, tmp_path, name, line, reason):
        path = write(tmp_path / name, {"id": 1, "contents": "a"}, "", line)
        with pytest.raises(ValueError, match=reason) as error:
            list(read_corpus(path))
        assert str(error.value).startswith(f"{path}, line 3: ")
        assert "\n" not in str(error.value)

    def test_broken_utf8(self, tmp_path):
        path = tmp_path / "corpus.jsonl"
        path.write_bytes(b'{"id": 1, "contents": "\xff"}\n')
        with pytest.raises(ValueError, match=r"line 1: .* not JSON in UTF-8"):
            list(read_corpus(path))

    @pytest.mark.parametrize("damage", [lambda data: data[:-12], lambda data: b"plain" + data])
    def test_damaged_gzip(self, tmp_path, damage):
        path = write(tmp_path / "corpus.jsonl.gz", *[{"id": i, "contents": f"text {i}"} for i in range(100)])
        path.write_bytes(damage(path.read_bytes()))
        with pytest.raises(ValueError, match=r"cut short or damaged after line \d+"):
            list(read_corpus(path))

    def test_bad_path_fails_before_iteration(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"There is no corpus file .*missing\.jsonl\."):
            read_corpus(tmp_path / "missing.jsonl")
        with pytest.raises(ValueError, match=r"A corpus is a \.jsonl, .* got .*corpus\.csv\."):
            read_corpus(write(tmp_path / "corpus.csv", "id,contents"))

    @pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.jsonl.gz"])
    def test_skips_bad_lines(self, tmp_path, name):
        path = write(
            tmp_path / name,
            "not JSON",
            {"id": 1, "contents": "a"},
            {"id": 2},
            "[" * 100_000,
            {"id": 3, "contents": "b"},
        )
        reader = read_corpus(path, skip_bad_lines=True)
        assert list(reader) == [Document("1", "a"), Document("3", "b")]
        assert reader.skipped == 3
        assert reader.done == reader.total == path.stat().st_size

    def test_columns(self, tmp_path):
        rows = [{"key": 1, "name": "A", "body": "a"}, {"key": 2, "name": None, "body": "b"}]
        path = write(tmp_path / "corpus.jsonl", *rows)
        reader = read_corpus(path, id_column="key", title_column="name", text_column="body")
        assert list(reader) == [Document("1", '"A"\na'), Document("2", '""\nb')]
        assert next(read_corpus(path, id_column="key", contents_column="body")) == Document("1", "a")
        with pytest.raises(ValueError, match=r'line 1: expected {"id": …, "body": …}, but "id" is missing'):
            next(read_corpus(path, text_column="body"))
        with pytest.raises(ValueError, match="'name' of the titles needs a column of the texts"):
            read_corpus(path, title_column="name")

    def test_spans(self, tmp_path):
        path = write(tmp_path / "corpus.jsonl", "", {"id": 1, "contents": "ü"}, " ", {"id": 2, "contents": "b"})
        reader = read_corpus(path)
        lines = [(document, path.read_bytes()[slice(reader.span[0], sum(reader.span))]) for document in reader]
        assert [json.loads(line)["id"] for _, line in lines] == [1, 2]
        assert reader.line_file == path

    def test_folder_of_shards(self, tmp_path):
        for name, identifier in (("b.jsonl", 2), ("a/x.jsonl.gz", 1), ("c.jsonl", 3), (".hidden/d.jsonl", 4)):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            write(tmp_path / name, {"id": identifier, "contents": "a"})
        reader = read_corpus(tmp_path)
        assert [document.id for document in reader] == ["1", "2", "3"]
        assert reader.done == reader.total
        assert reader.line_file is None
        (tmp_path / "notes.txt").write_text("text")
        with pytest.raises(ValueError, match=r"several kinds \(a/x\.jsonl\.gz, notes\.txt\)"):
            read_corpus(tmp_path)

    def test_empty_folder(self, tmp_path):
        with pytest.raises(ValueError, match=r"holds no \.jsonl"):
            read_corpus(tmp_path)

    @pytest.mark.parametrize("source", ["corpus", "./corpus", "../corpus", "./owner/name", "/nowhere/name", "a/b/c"])
    def test_what_is_no_name_of_a_data_set(self, tmp_path, monkeypatch, source):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(FileNotFoundError, match="There is no corpus file or folder"):
            read_corpus(source)

    def test_memory_stays_flat(self, tmp_path):
        path = tmp_path / "corpus.jsonl"
        with path.open("w") as file:
            for i in range(20_000):
                file.write(json.dumps({"id": i, "contents": "x" * 1_000}) + "\n")
        tracemalloc.start()
        try:
            assert sum(1 for _ in read_corpus(path)) == 20_000
            assert tracemalloc.get_traced_memory()[1] < 2_000_000
        finally:
            tracemalloc.stop()


class TestParquet:
    def test_reads(self, tmp_path):
        pq.write_table(
            pa.table({"id": range(2_500), "title": ["T"] * 2_500, "text": ["x"] * 2_500, "more": [0] * 2_500}),
            tmp_path / "a.parquet",
            row_group_size=1_000,
        )
        pq.write_table(pa.table({"text": ["y"], "title": ["U"], "id": ["last"]}), tmp_path / "b.parquet")
        columns = {"title_column": "title", "text_column": "text"}
        reader = read_corpus(tmp_path, **columns)
        assert (reader.total, reader.unit) == (2_501, "rows")
        documents = list(reader)
        assert documents[0] == Document("0", '"T"\nx')
        assert documents[-1] == Document("last", '"U"\ny')
        assert len(documents) == reader.done == 2_501
        assert len(list(read_corpus(tmp_path / "b.parquet", contents_column="text"))) == 1

    def test_bad_row(self, tmp_path):
        path = tmp_path / "corpus.parquet"
        pq.write_table(pa.table({"id": [1, 2, 3], "contents": ["a", None, "c"]}), path)
        with pytest.raises(ValueError, match=r"corpus\.parquet, row 2: \"contents\" must be a string, got a NoneType"):
            list(read_corpus(path))
        reader = read_corpus(path, skip_bad_lines=True)
        assert [document.id for document in reader] == ["1", "3"]
        assert reader.skipped == 1

    def test_missing_column(self, tmp_path):
        path = tmp_path / "corpus.parquet"
        pq.write_table(pa.table({"id": [1], "text": ["a"]}), path)
        with pytest.raises(ValueError, match=r'corpus\.parquet: there is no column "contents", only id, text'):
            list(read_corpus(path))

    def test_damaged(self, tmp_path):
        (tmp_path / "corpus.parquet").write_bytes(b"PAR1 what")
        with pytest.raises(ValueError, match=r"corpus\.parquet is no Parquet file, or damaged"):
            read_corpus(tmp_path / "corpus.parquet")


class DataSets(BaseHTTPRequestHandler):
    """What of the Hub is asked when the data set `owner/name` of one Parquet file is streamed."""

    protocol_version = "HTTP/1.1"
    content = b""
    name = "data/train-00000-of-00001.parquet"

    def log_message(self, *args):
        pass

    def answer(self, status, body, **headers):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self):
        body = unquote(self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode())
        path = self.path.partition("?")[0]
        folder = {"type": "directory", "path": "data", "oid": "2" * 40}
        file = {"type": "file", "path": self.name, "size": len(self.content), "oid": "1" * 40}
        if not path.startswith(("/api/datasets/owner/name", "/datasets/owner/name/")):
            self.answer(404, b'{"error": "Repository not found"}', X_Error_Code="RepoNotFound")
        elif "/resolve/" in path and path.endswith(self.name):
            first, _, last = (self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")
            part = self.content[int(first) : int(last) + 1 if last else None]
            commit = {"X_Repo_Commit": "0" * 40, "ETag": '"1"', "Accept_Ranges": "bytes"}
            end = int(first) + len(part) - 1
            if self.headers.get("Range"):
                self.answer(206, part, Content_Range=f"bytes {first}-{end}/{len(self.content)}", **commit)
            else:
                self.answer(200, part, **commit)
        elif "/resolve/" in path:
            self.answer(404, b"", X_Error_Code="EntryNotFound")
        elif "/tree/" in path:
            below = path.partition("/tree/")[2].partition("/")[2]
            recursive = "recursive=true" in self.path.lower()
            entries = {"": [folder] + [file] * recursive, "data": [file]}.get(below)
            if entries is None:
                self.answer(404, b"[]", X_Error_Code="EntryNotFound")
            else:
                self.answer(200, json.dumps(entries).encode())
        elif "/paths-info/" in path:
            self.answer(200, json.dumps([file] if self.name in body else []).encode())
        else:
            info = {"id": "owner/name", "sha": "0" * 40, "siblings": [{"rfilename": self.name}], "tags": []}
            self.answer(200, json.dumps(info).encode())

    do_HEAD = do_POST = do_GET


def test_hub(tmp_path):
    """In a process that takes a stand-in on the loopback for the Hub."""
    pq.write_table(
        pa.table({"id": [1, 2, 3], "title": ["A", "B", "C"], "text": ["a", None, "c"]}), tmp_path / "file.parquet"
    )
    handler = type("Handler", (DataSets,), {"content": (tmp_path / "file.parquet").read_bytes()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    code = """
from mempo_trl.search import read_corpus

reader = read_corpus("owner/name", title_column="title", text_column="text", skip_bad_lines=True)
print([document.contents for document in reader], reader.skipped, reader.unit)
for name, options in [("owner/name", {}), ("owner/name", {"split": "test"}), ("owner/other", {})]:
    try:
        list(read_corpus(name, text_column="text", **options))
    except (ValueError, FileNotFoundError) as error:
        print(type(error).__name__, error)
"""
    hub = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, **hub}, cwd=tmp_path, capture_output=True, check=True
        )
    finally:
        server.shutdown()
        server.server_close()
    read, bad_row, bad_split, missing = done.stdout.decode().splitlines()
    assert read == """['"A"\\na', '"C"\\nc'] 1 rows"""
    assert bad_row == 'ValueError owner/name, split train, row 2: "text" must be a string, got a NoneType.'
    assert bad_split.startswith("ValueError ")
    assert "test" in bad_split
    assert missing.startswith(
        "FileNotFoundError There is no corpus file or folder owner/other, and no data set of that name on the Hub: "
    )


class TestTexts:
    def test_folder(self, tmp_path):
        (tmp_path / "sub").mkdir()
        (tmp_path / "sub" / "plain.txt").write_bytes("\ufeffone two\r\nthree\r\n\r\nfour five six\r\n".encode())
        (tmp_path / "a.md").write_text("```\n# no heading\n```\n\nbefore\n\n## The *title* ##\n\nafter\n")
        documents = list(read_corpus(tmp_path, passage_words=4))
        assert {document.title for document in documents} == {"The *title*", "plain"}
        assert " ".join(d.text for d in documents if d.id.startswith("a.md")).split() == (
            "``` # no heading ``` before after".split()
        )
        texts = [document for document in documents if document.id.startswith("sub")]
        assert texts == [
            Document("sub/plain.txt#1", '"plain"\none two\nthree'),
            Document("sub/plain.txt#2", '"plain"\nfour five six'),
        ]
        assert list(read_corpus(tmp_path, passage_words=4)) == documents

    def test_single_file(self, tmp_path):
        (tmp_path / "a.md").write_text("# Title\ntext\n\n# Other\nmore")
        reader = read_corpus(tmp_path / "a.md")
        assert list(reader) == [Document("a.md#1", '"Title"\ntext\n\n# Other\nmore')]
        assert reader.done == reader.total

    def test_bad_line(self, tmp_path):
        (tmp_path / "a.txt").write_bytes(b"one\n\xff\ntwo")
        with pytest.raises(ValueError, match=r"a\.txt, line 2: the line is not text in UTF-8"):
            list(read_corpus(tmp_path))
        reader = read_corpus(tmp_path, skip_bad_lines=True)
        assert [document.text for document in reader] == ["one\ntwo"]
        assert reader.skipped == 1

    @pytest.mark.parametrize(("words", "overlap"), [(0, 0), (3, 3), (3, -1)])
    def test_wrong_sizes(self, tmp_path, words, overlap):
        (tmp_path / "a.txt").write_text("text")
        with pytest.raises(ValueError, match=r"(passage|overlap)_words must be at least"):
            read_corpus(tmp_path, passage_words=words, overlap_words=overlap)

    @pytest.mark.parametrize(
        ("paragraphs", "words", "overlap", "expected"),
        [
            (["a b", "c", "d e f"], 3, 0, ["a b\n\nc", "d e f"]),
            (["a b", "c d"], 3, 1, ["a b", "b\n\nc d"]),
            (["a  b\nc d e"], 2, 0, ["a  b", "c d", "e"]),
            (["a b\nc d e"], 3, 1, ["a b\nc", "c d e"]),
            (["x", "a b c d e"], 3, 0, ["x", "a b c", "d e"]),
            (["東京は首都", "a"], 3, 0, ["東京は", "首都\n\na"]),
            ([" ", ""], 3, 0, []),
        ],
    )
    def test_passages(self, paragraphs, words, overlap, expected):
        assert list(cut_into_passages(paragraphs, words, overlap)) == expected

    @pytest.mark.parametrize("overlap", [0, 3, 6])
    def test_no_word_is_lost(self, overlap):
        paragraphs = [" ".join(f"w{n}.{i}" for i in range(n * 5 % 17)) for n in range(40)]
        passages = [passage.split() for passage in cut_into_passages(paragraphs, 7, overlap)]
        assert max(map(len, passages)) <= 7
        assert list(dict.fromkeys(chain.from_iterable(passages))) == " ".join(paragraphs).split()
        if overlap:
            for before, passage in pairwise(passages):
                assert passage[: min(overlap, len(before))] == before[-overlap:]


class TestFingerprint:
    def test_of_a_folder(self, tmp_path):
        for name in ("a.txt", "b.txt"):
            (tmp_path / name).write_text(f"text of {name}")
        fingerprint = json.loads(json.dumps(read_corpus(tmp_path).fingerprint()))
        assert is_same_corpus(tmp_path, fingerprint)
        assert is_same_corpus(read_corpus(tmp_path), fingerprint)
        assert not is_same_corpus(read_corpus(tmp_path, passage_words=3), fingerprint)
        (tmp_path / "b.txt").rename(tmp_path / "c.txt")
        assert not is_same_corpus(tmp_path, fingerprint)

    def test_of_a_data_set(self, tmp_path):
        fingerprint = {"source": "owner/name", "options": {}, "size": 0, "modified": 0, "edges": "", "digest": ""}
        assert is_same_corpus("owner/name", fingerprint)
        assert not is_same_corpus("owner/other", fingerprint)
        assert not is_same_corpus(write(tmp_path / "corpus.jsonl", {"id": 1, "contents": "a"}), fingerprint)
