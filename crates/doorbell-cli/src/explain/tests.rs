//! Every page, with every mistake: it runs, it agrees with the engine, it fits, and the one in the docs is not out of date.

use clap::ValueEnum;

use super::checks::Refusal;
use super::*;
use doorbell::{Syndrome, Vendor};

fn page(operation: Operation, bad: Bad, styled: bool) -> String {
    let mut out = Vec::new();
    let args = ExplainArgs {
        operation,
        bad: Some(bad),
        fault: Vec::new(),
    };
    tell(&mut out, styled, &args).unwrap();
    String::from_utf8(out).unwrap()
}

fn under(operation: Operation, rule: &str) -> anyhow::Result<String> {
    let mut out = Vec::new();
    let args = ExplainArgs {
        operation,
        bad: None,
        fault: vec![rule.to_owned()],
    };
    tell(&mut out, false, &args)?;
    Ok(String::from_utf8(out)?)
}

#[test]
fn a_fault_is_played_and_who_notices_it_is_said() {
    for (rule, parts) in [
        (
            "n=1: drop-doorbell",
            &[
                "Nothing was written: all 64 bytes",
                "seen by the engine 0, complete 0",
                "fault script rule 1 (n=1: drop-doorbell) dropped it",
                "the first is served as well",
            ][..],
        ),
        (
            "n=1: withhold-cqe",
            &[
                "Nothing was written: all 64 bytes",
                "the bytes arrived: the work was done",
                "no CQE was written",
            ],
        ),
        (
            "n=1: fail=RNR_RETRY",
            &["RNR_RETRY", "Qp::error: WQE 0", "Posted once more"],
        ),
        (": kill-engine", &["Qp::reset fails", "open it anew"]),
    ] {
        for operation in Operation::value_variants() {
            let text = under(*operation, rule).unwrap_or_else(|e| panic!("{rule}: {e:#}"));
            for part in parts {
                let flat = text.split_whitespace().collect::<Vec<_>>().join(" ");
                // A signal's first rule hits its put.
                assert!(
                    flat.contains(part) || *operation != Operation::Put,
                    "{operation:?} {rule}: no {part:?} in\n{text}"
                );
            }
            for line in text.lines() {
                assert!(line.chars().count() <= 80, "{operation:?} {rule}: {line}");
            }
        }
    }
}

#[test]
fn faults_that_cannot_be_shown_here_are_refused_with_where_they_can() {
    for (rule, part) in [
        ("wqe=7: drop-doorbell", "no rule fired"),
        (": kill-process", "perf --link shm"),
        (": drop-link", "no packets"),
    ] {
        let error = under(Operation::Put, rule).unwrap_err();
        assert!(error.is::<crate::WrongArguments>(), "{rule}: {error:#}");
        assert!(format!("{error:#}").contains(part), "{rule}: {error:#}");
    }
}

#[test]
fn every_operation_with_every_mistake() {
    for operation in Operation::value_variants() {
        for bad in Bad::value_variants() {
            if *operation == Operation::Send && *bad != Bad::Lkey {
                continue;
            }
            let text = page(*operation, *bad, false);
            for line in text.lines() {
                assert!(line.chars().count() <= 80, "{operation:?} {bad:?}: {line}");
            }
            let vendor = match bad {
                Bad::Rkey => "BAD_RKEY",
                Bad::Lkey => "BAD_LKEY",
                Bad::Range => "RKEY_RANGE",
                Bad::Access => "RKEY_ACCESS",
            };
            assert!(text.contains(vendor), "{operation:?} {bad:?}\n{text}");
            let opcode = match operation {
                Operation::Put => "RDMA_WRITE",
                Operation::Get => "RDMA_READ",
                Operation::Send => "2: a SEND arrived",
                Operation::Signal | Operation::Atomic => "FETCH_ADD",
            };
            assert!(text.contains(opcode), "{operation:?} {bad:?}\n{text}");
            assert_eq!(
                text.matches("   NO  ").count(),
                1,
                "one check fails: {text}"
            );
        }
    }
}

#[test]
fn colours_are_asked_for() {
    let styled = page(Operation::Atomic, Bad::Rkey, true);
    assert!(styled.contains("\x1b[1;31mNO\x1b[0m"));
    assert!(!page(Operation::Atomic, Bad::Rkey, false).contains('\x1b'));
}

#[test]
fn every_byte_of_a_wqe_has_a_name() {
    let mut lab = Lab::open().unwrap();
    for operation in Operation::value_variants() {
        for wqe in lab.act(*operation, None).unwrap().wqes {
            let mut next = 0;
            for segment in fields::wqe(&wqe, &|key| key.to_string()) {
                assert_eq!(segment.bytes.start, next);
                for field in &segment.fields {
                    assert_eq!(field.bytes.start, next, "{operation:?}: {field:?}");
                    next = field.bytes.end;
                }
                assert_eq!(segment.bytes.end, next);
            }
            assert_eq!(next, 16 * usize::from(wqe[7]), "up to ds");
        }
    }
}

#[test]
fn a_page_that_disagrees_with_the_engine_fails() {
    let mut lab = Lab::open().unwrap();
    let acted = lab.act(Operation::Put, Some(Bad::Range)).unwrap();
    let right = Refusal {
        syndrome: Syndrome::REMOTE_ACCESS,
        vendor: Vendor::RKEY_RANGE,
    };
    agree(&acted, Some(right)).unwrap();
    let wrong = Refusal {
        vendor: Vendor::BAD_RKEY,
        ..right
    };
    for expected in [Some(wrong), None] {
        let error = agree(&acted, expected).unwrap_err().to_string();
        assert!(error.contains("bug"), "{error}");
    }
}

/// Keys and QP numbers are drawn anew in each run: numbers of eight and six digits, and single bytes, are left out.
fn without_numbers(text: &str) -> String {
    let masked = |word: &str| match word.split_once("0x") {
        Some((before, rest)) => {
            let digits = rest.chars().take_while(char::is_ascii_hexdigit).count();
            match digits {
                6 | 8 => format!("{before}0x_{}", &rest[digits..]),
                _ => word.to_owned(),
            }
        }
        None if word.len() == 2 && word.chars().all(|c| c.is_ascii_hexdigit()) => "xx".to_owned(),
        None => word.to_owned(),
    };
    let line = |line: &str| line.split(' ').map(masked).collect::<Vec<_>>().join(" ");
    text.lines().map(line).collect::<Vec<_>>().join("\n")
}

#[test]
fn the_page_in_the_docs_is_what_the_command_prints() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/explain.md");
    let doc = std::fs::read_to_string(path).unwrap();
    let (begin, end) = ("```text\n$ doorbell explain put\n", "```\n");
    let from = doc.find(begin).expect("the page begins") + begin.len();
    let to = from + doc[from..].find(end).expect("the page ends");
    let now = page(Operation::Put, Bad::Rkey, false);
    if std::env::var_os("DOORBELL_BLESS").is_some() {
        let blessed = format!("{}{now}{}", &doc[..from], &doc[to..]);
        std::fs::write(path, blessed).unwrap();
        return;
    }
    assert_eq!(
        without_numbers(doc[from..to].trim_end()),
        without_numbers(now.trim_end()),
        "docs/explain.md: bless it with DOORBELL_BLESS=1"
    );
}
