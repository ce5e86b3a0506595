//! `aquifer object` from a user's perspective.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};

use aquifer::{Objects, Pool};

use crate::support::{
    Place, aquifer, bytes, failed, fails, json, run, run_without_privileges, says, text, worked,
    works,
};

fn open(pool: &str) -> Objects {
    let options = Pool::options().background(false);
    Objects::new(options.open(pool).unwrap())
}

/// Stores bytes and makes them durable.
fn store(objects: &Objects, name: &str, offset: usize, bytes: &[u8]) {
    let mut attachment = objects.attach_mut(name).unwrap();
    attachment.as_mut_slice().unwrap()[offset..offset + bytes.len()].copy_from_slice(bytes);
    attachment.psync().unwrap();
}

fn raw(pool: &str, name: &str, range: &[&str]) -> Vec<u8> {
    let output = run(&[&["object", "dump", pool, name, "--raw"], range].concat());
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    output.stdout
}

#[test]
fn an_object_lives_and_dies() {
    let place = Place::new();
    let pool = place.pool();
    says(&works(&["object", "list", &pool]), &["no objects in", "aquifer object create"]);
    assert_eq!(json(&["object", "list", &pool, "--json"])["objects"], serde_json::json!([]));

    let made = works(&["object", "create", &pool, "graph", "--size", "5000"]);
    says(&made, &["created graph", "8 KiB", "fixed", "D: detached", "UTC"]);
    let at = "0x300000000000";
    works(&["object", "create", &pool, "a", "--size", "64K", "--address", at, "--relocatable"]);
    works(&["object", "create", &pool, "words", "--size", "64K", "--heap"]);

    let list = json(&["object", "list", &pool, "--json"]);
    let names: Vec<_> = list["objects"].as_array().unwrap().iter().map(|o| &o["name"]).collect();
    assert_eq!(names, ["a", "graph", "words"]);
    let [a, graph, words] = [0, 1, 2].map(|index| &list["objects"][index]);
    assert_eq!(a["address"], 0x3000_0000_0000_u64);
    assert_eq!((&a["is_relocatable"], &graph["is_relocatable"]), (&true.into(), &false.into()));
    assert_eq!((&words["is_heap"], &graph["is_heap"]), (&true.into(), &false.into()));
    assert_eq!(graph["size_bytes"], 8192);
    assert_eq!(graph["runs"][0]["len_bytes"], 8192);
    assert_eq!((&graph["state"], &graph["state_name"]), (&"D".into(), &"detached".into()));
    assert_eq!(graph["holders"], serde_json::json!([]));
    assert_eq!(graph["needs_read_key"], false);
    assert_eq!(graph["name_is_utf8"], true);
    assert!(graph["created_ns"].as_u64().unwrap() <= graph["changed_ns"].as_u64().unwrap());
    assert_eq!(&json(&["object", "info", &pool, "graph", "--json"]), graph);
    let table = works(&["object", "list", &pool]);
    says(&table, &["address", "graph", "8 KiB", at]);
    assert_eq!(table.lines().count(), 4, "{table}");
    says(&works(&["object", "info", &pool, "a"]), &["0x300000000000 to 0x300000010000, may move"]);
    says(&works(&["object", "info", &pool, "words"]), &["for a heap"]);
    let made = json(&["object", "create", &pool, "json", "--size", "4K", "--json"]);
    assert_eq!(made, json(&["object", "info", &pool, "json", "--json"]));
    works(&["object", "destroy", &pool, "json", "--yes"]);

    says(&works(&["object", "destroy", &pool, "graph", "--yes"]), &["destroyed graph (8 KiB)"]);
    says(&fails(&["object", "info", &pool, "graph"], 1), &["no object", "aquifer object list"]);
    assert_eq!(json(&["pool", "info", &pool, "--json"])["objects"], 2);
}

#[test]
fn resizing_says_what_became_of_the_address() {
    let place = Place::new();
    let pool = place.pool();
    let create = |name, address, more: &[&str]| {
        let arguments = ["object", "create", &pool, name, "--size", "8K", "--address", address];
        works(&[&arguments[..], more].concat());
    };
    create("fixed", "0x300000000000", &[]);
    create("free", "0x300000002000", &["--relocatable"]);
    create("wall", "0x300000004000", &[]);
    store(&open(&pool), "free", 100, b"content");

    let same = json(&["object", "resize", &pool, "free", "--size", "8K", "--json"]);
    let at = 0x3000_0000_2000_u64;
    for (part, value) in [
        ("previous_size_bytes", 8192),
        ("size_bytes", 8192),
        ("previous_address", at),
        ("address", at),
    ] {
        assert_eq!(same[part], value, "{part}");
    }
    assert_eq!((&same["name"], &same["has_moved"]), (&"free".into(), &false.into()));

    let moved = works(&["object", "resize", &pool, "free", "--size", "1M"]);
    says(&moved, &["from 8 KiB to 1 MiB", "changed from 0x300000002000 to", "invalid"]);
    assert_eq!(&raw(&pool, "free", &["--range", "100..107"]), b"content");
    let free = json(&["object", "info", &pool, "free", "--json"]);
    assert_ne!(free["address"], 0x3000_0000_2000_u64);
    assert_eq!(free["size_bytes"], 1 << 20);

    let grown = works(&["object", "resize", &pool, "fixed", "--size", "16K"]);
    says(&grown, &["from 8 KiB to 16 KiB", "its address is 0x300000000000 as before"]);
    let before = bytes(&pool);
    let refused = fails(&["object", "resize", &pool, "fixed", "--size", "64K"], 1);
    says(&refused, &["fixed", "wall", "relocatable"]);
    says(&works(&["object", "resize", &pool, "fixed", "--size", "1"]), &["to 4 KiB"]);
    assert!(bytes(&pool).len() == before.len());
    says(&fails(&["object", "resize", &pool, "free", "--size", "1G"], 1), &["full", "grow"]);
    says(&fails(&["object", "resize", &pool, "free", "--size", "0"], 1), &["at least one page"]);
    says(&fails(&["object", "resize", &pool, "nobody", "--size", "1M"], 1), &["no object"]);
}

#[test]
fn keys_come_from_options_files_and_the_environment() {
    let place = Place::new();
    let pool = place.pool();
    let [key_file, other_file, empty, huge] =
        ["key", "other", "empty", "huge"].map(|name| place.text(name));
    // One line break is the editor's; a second one belongs to the key.
    fs::write(&key_file, "w\u{fc}rgh\n").unwrap();
    fs::write(&other_file, "w\u{fc}rgh\n\n").unwrap();
    fs::write(&empty, "\n").unwrap();
    fs::write(&huge, vec![b'k'; 100_000]).unwrap();
    let create = ["object", "create", &pool, "graph", "--size", "4K", "--read-key", "r"];
    works(&[&create[..], &["--write-key-file", &key_file]].concat());
    let info = json(&["object", "info", &pool, "graph", "--json"]);
    assert_eq!((&info["needs_read_key"], &info["needs_write_key"]), (&true.into(), &true.into()));
    says(&works(&["object", "list", &pool]), &["read, write"]);

    let dump = ["object", "dump", &pool, "graph"];
    let resize = ["object", "resize", &pool, "graph", "--size", "8K"];
    says(&fails(&dump, 1), &["asks for its key", "none was given", "--key-file", "AQUIFER_KEY"]);
    says(&fails(&resize, 1), &["none was given", "--key-file"]);
    says(&fails(&[&dump[..], &["--key", "x"]].concat(), 1), &["the one given is another"]);
    works(&[&dump[..], &["--key", "r"]].concat());
    works(&[&dump[..], &["--key-file", &key_file]].concat());
    fails(&[&dump[..], &["--key-file", &other_file]].concat(), 1);
    let with_variable = |arguments: &[&str], key: &str| {
        aquifer().args(arguments).env("AQUIFER_KEY", key).output().unwrap()
    };
    worked(with_variable(&dump, "r"), "the variable");
    says(&failed(with_variable(&dump, "x"), 1, "a wrong variable"), &["is another"]);
    says(&failed(with_variable(&dump, ""), 1, "an empty variable"), &["none was given"]);
    // An option takes precedence over the variable.
    let both = [&dump[..], &["--key", "r"]].concat();
    worked(with_variable(&both, "x"), "an option and a variable");

    says(&fails(&[&resize[..], &["--key", "r"]].concat(), 1), &["reading only"]);
    says(&failed(with_variable(&resize, "r"), 1, "the key for reading"), &["reading only"]);
    works(&[&resize[..], &["--key-file", &key_file]].concat());
    let destroy = ["object", "destroy", &pool, "graph", "--yes"];
    says(&fails(&destroy, 1), &["none was given", "--key-file"]);
    says(&fails(&[&destroy[..], &["--key", "r"]].concat(), 1), &["reading only"]);
    let missing = place.text("missing");
    for (file, reason) in [
        (&missing, "cannot read a key"),
        (&place.text(""), "cannot read a key"),
        (&empty, "the key is empty"),
        (&huge, "longer than 64 KiB"),
    ] {
        says(&fails(&[&destroy[..], &["--key-file", file]].concat(), 1), &[reason, file]);
    }
    fails(&[&destroy[..], &["--key-file", &key_file, "--key", "r"]].concat(), 2);
    works(&[&destroy[..], &["--key-file", &key_file]].concat());

    // An unset variable in a script.
    for option in ["--read-key", "--write-key"] {
        let create = ["object", "create", &pool, "other", "--size", "4K", option, ""];
        says(&fails(&create, 1), &["key is empty", option]);
    }
    // The keys of a new object, from the environment.
    let made = aquifer()
        .args(["object", "create", &pool, "other", "--size", "4K"])
        .env("AQUIFER_WRITE_KEY", "w")
        .output();
    says(&worked(made.unwrap(), "create"), &["keys", "write"]);
    works(&["object", "dump", &pool, "other"]);
    fails(&["object", "destroy", &pool, "other", "--yes"], 1);
    works(&["object", "destroy", &pool, "other", "--yes", "--key", "w"]);
}

#[test]
fn attached_processes_are_listed_and_respected() {
    let place = Place::new();
    let pool = place.pool();
    works(&["object", "create", &pool, "graph", "--size", "4K"]);
    let objects = open(&pool);
    let own = std::process::id();
    let info = || json(&["object", "info", &pool, "graph", "--json"]);
    let destroy = ["object", "destroy", &pool, "graph", "--yes"];

    let writer = objects.attach_mut("graph").unwrap();
    let holder =
        |access| serde_json::json!([{"pid": own, "access": access, "is_committing": false}]);
    assert_eq!((&info()["state"], &info()["holders"]), (&"W".into(), &holder("write")));
    let shown = works(&["object", "info", &pool, "graph"]);
    says(&shown, &["W: attached for writing", &format!("attached by {own}")]);
    says(&works(&["object", "list", &pool]), &[" W ", &own.to_string()]);
    let refused = fails(&["object", "dump", &pool, "graph"], 1);
    says(&refused, &["graph", &own.to_string(), "reading"]);
    says(&fails(&destroy, 1), &[&own.to_string()]);
    drop(writer);

    let reader = objects.attach("graph").unwrap();
    assert_eq!((&info()["state"], &info()["holders"]), (&"R".into(), &holder("read")));
    works(&["object", "dump", &pool, "graph"]);
    says(&fails(&destroy, 1), &[&own.to_string()]);
    fails(&["object", "resize", &pool, "graph", "--size", "8K"], 1);
    drop(reader);
    works(&destroy);
}

/// A copy of the file of an open pool equals the state after a crash: the content is only in the
/// log.
#[test]
fn what_is_only_in_the_log_is_shown() {
    let place = Place::new();
    let pool = place.pool();
    works(&["object", "create", &pool, "graph", "--size", "64K"]);
    let objects = open(&pool);
    store(&objects, "graph", 5000, b"in the log");
    let crashed = place.text("crashed.pool");
    fs::copy(&pool, &crashed).unwrap();
    drop(objects);
    let before = bytes(&crashed);
    assert_eq!(json(&["object", "info", &crashed, "graph", "--json"])["state"], "C");
    assert_eq!(&raw(&crashed, "graph", &["--range", "5000..5010"]), b"in the log");
    assert!(bytes(&crashed) == before, "a reader has changed the pool");
}

#[test]
fn a_dump_is_what_xxd_shows() {
    let place = Place::new();
    let pool = place.pool();
    works(&["object", "create", &pool, "graph", "--size", "12K"]);
    let objects = open(&pool);
    let all: Vec<u8> = (0..=255).collect();
    for (offset, bytes) in [(0, &all[..]), (0x130, b"x"), (0x151, b"y"), (0x1fff, b"end")] {
        store(&objects, "graph", offset, bytes);
    }
    drop(objects);
    let mut content = vec![0; 12 << 10];
    content[..256].copy_from_slice(&all);
    (content[0x130], content[0x151]) = (b'x', b'y');
    content[0x1fff..0x2002].copy_from_slice(b"end");
    assert!(raw(&pool, "graph", &[]) == content);

    let first = works(&["object", "dump", &pool, "graph", "--range", "..0x44"]);
    let line = "00000040: 4041 4243                                @ABC\n";
    assert!(first.ends_with(line), "{first}");
    let file = place.path("content");
    fs::write(&file, &content).unwrap();
    for (range, skip, len) in [
        ("..", 0, 12 << 10),
        ("0..12K", 0, 12 << 10),
        ("5..0x205", 5, 512),
        ("0x100..0x160", 0x100, 0x60),
        ("0x2001..", 0x2001, 0xfff),
        // One, two, three and four lines of zeros at the end.
        ("0x2000..0x2020", 0x2000, 0x20),
        ("0x2000..0x2030", 0x2000, 0x30),
        ("0x2000..0x2040", 0x2000, 0x40),
        ("0x2000..0x2050", 0x2000, 0x50),
        ("0x2000..0x2043", 0x2000, 0x43),
        ("4096..4096", 4096, 0),
    ] {
        assert!(raw(&pool, "graph", &["--range", range]) == content[skip..skip + len], "{range}");
        let shown = works(&["object", "dump", &pool, "graph", "--range", range]);
        let (skip, len) = (format!("-s{skip}"), format!("-l{len}"));
        match Command::new("xxd").args(["-a", &skip, &len]).arg(&file).output() {
            Ok(expected) => assert_eq!(shown, text(&expected.stdout), "{range}"),
            Err(error) => eprintln!("skipped: comparison with xxd: {error}"),
        }
    }
    for range in ["0..12289", "12289..", "1M..2M"] {
        let refused = fails(&["object", "dump", &pool, "graph", "--range", range], 1);
        says(&refused, &["12288", "12 KiB"]);
    }
    for range in ["5..4", "5", "a..b", "-1..5", ""] {
        fails(&["object", "dump", &pool, "graph", &format!("--range={range}")], 2);
    }
}

#[test]
fn names_of_any_bytes() {
    let place = Place::new();
    let pool = place.pool();
    let name = OsString::from_vec(b"caf\xff\n\\".to_vec());
    let with_name = |before: &[&str], after: &[&str]| {
        let mut arguments: Vec<&OsStr> = before.iter().map(OsStr::new).collect();
        arguments.push(&name);
        arguments.extend(after.iter().map(OsStr::new));
        arguments.iter().map(|part| (*part).to_owned()).collect::<Vec<_>>()
    };
    let shown = "caf\\xff\\n\\\\";
    let made = works(&with_name(&["object", "create", &pool], &["--size", "4K"]));
    says(&made, &[shown]);
    says(&works(&["object", "list", &pool]), &[shown]);
    let info = json(&with_name(&["object", "info", &pool], &["--json"]));
    assert_eq!((&info["name"], &info["name_is_utf8"]), (&shown.into(), &false.into()));
    works(&with_name(&["object", "dump", &pool], &[]));
    says(&works(&with_name(&["object", "destroy", &pool], &["--yes"])), &[shown]);

    // Text is unescaped in JSON, and escaped only for a terminal.
    let text = "größe\\\u{1b}[2J";
    works(&["object", "create", &pool, text, "--size", "4K"]);
    assert_eq!(json(&["object", "info", &pool, text, "--json"])["name"], text);
    says(&works(&["object", "info", &pool, text]), &["größe\\\\\\u{1b}[2J"]);
}

#[test]
fn what_cannot_be_created_is_refused_with_a_reason() {
    let place = Place::new();
    let pool = place.pool();
    works(&["object", "create", &pool, "first", "--size", "4K", "--address", "0x300000000000"]);
    let long = "n".repeat(256);
    for (name, arguments, reason) in [
        ("first", &["--size", "4K"][..], "already"),
        ("big", &["--size", "1G"], "full"),
        ("huge", &["--size", "1T"], "512 GiB"),
        ("none", &["--size", "0"], "at least one page"),
        ("", &["--size", "4K"], "between 1 and 255 bytes"),
        (&long, &["--size", "4K"], "between 1 and 255 bytes"),
        ("low", &["--size", "4K", "--address", "0x1000"], "between 0x200000000000 and"),
        ("odd", &["--size", "4K", "--address", "0x300000100001"], "multiple of 4096"),
        ("over", &["--size", "4K", "--address", "0x300000000000"], "overlap"),
    ] {
        let arguments = [&["object", "create", &pool, name], arguments].concat();
        says(&fails(&arguments, 1), &[reason]);
    }
    for arguments in [
        &["--size", "some"][..],
        &["--size", "4K", "--address", "here"],
        &["--size", "4K", "--read-key", "a", "--read-key-file", "b"],
        &[],
    ] {
        fails(&[&["object", "create", &pool, "wrong"], arguments].concat(), 2);
    }
    let list = json(&["object", "list", &pool, "--json"]);
    assert_eq!(list["objects"].as_array().unwrap().len(), 1, "{list}");
}

#[test]
fn what_is_no_pool_has_no_objects() {
    let place = Place::new();
    let [missing, foreign] = ["missing", "foreign"].map(|name| place.text(name));
    fs::write(&foreign, "no pool".repeat(10_000)).unwrap();
    let directory = place.text("");
    for (path, reason) in
        [(&missing, "does not exist"), (&foreign, "is not a pool"), (&directory, "is a directory")]
    {
        for arguments in [
            &["object", "create", path, "x", "--size", "4K"][..],
            &["object", "list", path, "--json"],
            &["object", "info", path, "x"],
            &["object", "resize", path, "x", "--size", "4K"],
            &["object", "dump", path, "x"],
            &["object", "destroy", path, "x", "--yes"],
        ] {
            says(&fails(arguments, 1), &[reason, path]);
        }
    }
    let pool = place.pool();
    for arguments in [
        &["object", "info", &pool, "nobody"][..],
        &["object", "dump", &pool, "nobody"],
        &["object", "destroy", &pool, "nobody", "--yes"],
    ] {
        says(&fails(arguments, 1), &["no object", "nobody"]);
    }
}

#[test]
fn a_pool_that_may_only_be_read_is_only_read() {
    let place = Place::public();
    let pool = place.pool();
    works(&["object", "create", &pool, "graph", "--size", "4K"]);
    fs::set_permissions(&pool, fs::Permissions::from_mode(0o444)).unwrap();
    for reading in [
        &["object", "list", &pool][..],
        &["object", "info", &pool, "graph"],
        &["object", "dump", &pool, "graph"],
    ] {
        let Some(output) = run_without_privileges(reading) else { return };
        worked(output, reading);
    }
    for writing in [
        &["object", "create", &pool, "other", "--size", "4K"][..],
        &["object", "resize", &pool, "graph", "--size", "8K"],
        &["object", "destroy", &pool, "graph", "--yes"],
    ] {
        let output = run_without_privileges(writing).unwrap();
        says(&failed(output, 1, writing), &["no permission to write", &pool]);
    }
}

#[test]
fn destroying_asks_first() {
    let place = Place::new();
    let pool = place.pool();
    works(&["object", "create", &pool, "graph", "--size", "4K"]);
    let destroy = ["object", "destroy", &pool, "graph"];
    says(&fails(&destroy, 1), &["no terminal", "--yes"]);

    // `script` runs the command on a terminal.
    let answered = |answer: &str| {
        let line = format!("{} {}", env!("CARGO_BIN_EXE_aquifer"), destroy.join(" "));
        let mut script = Command::new("script")
            .args(["--quiet", "--return", "--command", &line, "/dev/null"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        std::io::Write::write_all(&mut script.stdin.take().unwrap(), answer.as_bytes())?;
        script.wait_with_output()
    };
    for (answer, is_there) in [("n\n", true), ("\n", true), ("yes\n", false)] {
        match answered(answer) {
            Err(error) => return eprintln!("skipped: asking on a terminal: {error}"),
            Ok(output) => {
                says(text(&output.stdout), &["destroy graph (4 KiB)", "permanently"]);
                assert_eq!(output.status.success(), !is_there, "{answer:?}: {output:?}");
            }
        }
        let objects = &json(&["object", "list", &pool, "--json"])["objects"];
        assert_eq!(objects.as_array().unwrap().len(), usize::from(is_there), "{answer:?}");
    }
}

#[test]
fn raw_bytes_do_not_go_to_a_terminal() {
    let place = Place::new();
    let pool = place.pool();
    works(&["object", "create", &pool, "graph", "--size", "4K"]);
    let line = format!("{} object dump {pool} graph --raw", env!("CARGO_BIN_EXE_aquifer"));
    let shown = Command::new("script")
        .args(["--quiet", "--return", "--command", &line, "/dev/null"])
        .stdin(Stdio::null())
        .output();
    match shown {
        Err(error) => eprintln!("skipped: a terminal: {error}"),
        Ok(output) => {
            assert_eq!(output.status.code(), Some(1), "{output:?}");
            says(text(&output.stdout), &["terminal", "> FILE"]);
        }
    }
}
