use std::time::Duration;

use doorbell_wire::{Qpn, Syndrome, Vendor};

use super::parse::{ACTIONS, SELECTORS};
use super::run::{At, corrupt};
use super::{Action, Place, QpSelect, Script, ScriptError, ScriptRun};

fn script(text: &str) -> Script {
    text.parse()
        .unwrap_or_else(|e: ScriptError| panic!("{text}: {e}"))
}

#[test]
fn rules_are_read_as_they_are_meant() {
    let one = |text: &str| script(text).rules.remove(0);
    let rule = one("qp=*,wqe=1023:drop-doorbell");
    assert_eq!(
        (rule.qp, rule.action),
        (QpSelect::All, Action::DropDoorbell)
    );
    assert_eq!(rule.place, Place::Send(1023..1024));
    let rule = one("  qp = 0x42 , every=1_000 ,n=3, rank=1 : delay-doorbell = 1.5ms ");
    assert_eq!(rule.qp, QpSelect::Number(0x42));
    assert_eq!(
        (rule.every, rule.times, rule.rank),
        (1000, Some(3), Some(1))
    );
    assert_eq!(
        rule.action,
        Action::DelayDoorbell(Duration::from_micros(1500))
    );
    assert_eq!(
        rule.text,
        "qp=0x42, every=1_000, n=3, rank=1: delay-doorbell=1.5ms"
    );
    assert_eq!(one("wqe=5..=9: withhold-cqe").place, Place::Send(5..10));
    assert_eq!(
        one("wqe=5..: withhold-cqe=2s").place,
        Place::Send(5..u64::MAX)
    );
    assert_eq!(one("wqe=..7: corrupt-cqe").place, Place::Send(0..7));
    assert_eq!(
        one("recv=3,qp=#2: corrupt-cqe=0xf0").place,
        Place::Receive(3..4)
    );
    assert_eq!(one("qp=#2: kill-engine").qp, QpSelect::Nth(2));
    assert_eq!(one("at=2s: stall-engine=10ms").place, Place::Engine);
    assert_eq!(
        one("at=2s, qp=#0: stall-engine=10ms").place,
        Place::Send(0..u64::MAX)
    );
    assert_eq!(one(": kill-process").place, Place::Send(0..u64::MAX));
    let fails = [
        ("0x13/0x89", Syndrome::REMOTE_ACCESS, Vendor::BAD_RKEY),
        (
            "REMOTE_ACCESS/BAD_RKEY",
            Syndrome::REMOTE_ACCESS,
            Vendor::BAD_RKEY,
        ),
        ("TRANSPORT_RETRY", Syndrome::TRANSPORT_RETRY, Vendor::NONE),
        ("0x77/200", Syndrome(0x77), Vendor(200)),
    ];
    for (text, syndrome, vendor) in fails {
        let rule = one(&format!("wqe=0: fail={text}"));
        assert_eq!(rule.action, Action::Fail(syndrome, vendor));
    }
}

#[test]
fn a_script_has_lines_comments_and_a_seed() {
    let text = "# two faults\nseed=7\n\nwqe=1: drop-doorbell; wqe=2: fail=0x01\n  # end\n";
    let read = script(text);
    assert_eq!((read.seed, read.rules.len()), (7, 2));
    assert_eq!(
        read.to_string(),
        "seed=7; wqe=1: drop-doorbell; wqe=2: fail=0x01"
    );
    assert_eq!(script(&read.to_string()), read);
    assert!(script(" ; \n# nothing").is_empty());
    assert_eq!(script(": kill-engine").to_string(), ": kill-engine");
}

#[test]
fn every_word_is_read() {
    for action in ACTIONS {
        let value = match *action {
            "fail" => "=0x13",
            "delay-doorbell" | "stall-engine" => "=1ms",
            _ => "",
        };
        let rule = &script(&format!("wqe=1: {action}{value}")).rules[0];
        assert_eq!(rule.action.name(), *action);
    }
    for selector in SELECTORS {
        let value = if *selector == "at" { "1s" } else { "1" };
        script(&format!("{selector}={value}: withhold-cqe"));
    }
}

#[test]
fn errors_say_where_what_and_what_instead() {
    for (text, line, column, word, part) in [
        ("wqe=1", 1, 1, "wqe=1", "where : action"),
        (
            "wqe=1: drop-dorbell",
            1,
            8,
            "drop-dorbell",
            "did you mean drop-doorbell?",
        ),
        ("qp=*,wqee=1: fail=1", 1, 6, "wqee", "did you mean wqe?"),
        ("color=1: fail=1", 1, 1, "color", "one of qp, wqe"),
        ("wqe=1: dance", 1, 8, "dance", "one of drop-doorbell"),
        ("\n wqe=x: fail=1", 2, 6, "x", "1000..2000"),
        ("wqe=9..9: fail=1", 1, 5, "9..9", "empty"),
        ("wqe=9..=: fail=1", 1, 9, "", "something is missing"),
        ("wqe=1,wqe=2: fail=1", 1, 7, "wqe=2", "second rule"),
        ("wqe=1,recv=2: withhold-cqe", 1, 7, "recv=2", "exclude"),
        (
            "wqe=1: delay-doorbell",
            1,
            8,
            "delay-doorbell",
            "delay-doorbell=10ms",
        ),
        ("wqe=1: delay-doorbell=10", 1, 23, "10", "with its unit"),
        ("wqe=1: stall-engine=1e9s", 1, 21, "1e9s", "with its unit"),
        (
            "wqe=1: stall-engine=99999999999s",
            1,
            21,
            "99999999999s",
            "a day",
        ),
        ("wqe=1: drop-doorbell=3", 1, 22, "3", "takes no value"),
        ("wqe=1: fail", 1, 8, "fail", "with which syndrome"),
        (
            "wqe=1: fail=REMOTE_ACESS",
            1,
            13,
            "REMOTE_ACESS",
            "mean REMOTE_ACCESS?",
        ),
        ("wqe=1: fail=0x13/256", 1, 18, "256", "vendor"),
        ("wqe=1: fail=0", 1, 13, "0", "no error"),
        ("wqe=1: corrupt-cqe=0", 1, 20, "0", "bits to turn over"),
        ("recv=1: kill-engine", 1, 9, "kill-engine", "of the sender"),
        ("every=0: kill-engine", 1, 7, "0", "from 1"),
        ("n=0: kill-engine", 1, 3, "0", "from 1"),
        ("qp=0x1000000: kill-engine", 1, 4, "0x1000000", "24 bits"),
        ("qp=0: kill-engine", 1, 4, "0", "24 bits"),
        ("qp=#x: kill-engine", 1, 5, "x", "#0"),
        ("rank=-1: kill-engine", 1, 6, "-1", "from 0"),
        ("wqe: kill-engine", 1, 1, "wqe", "wqe=1"),
        ("wqe=1,: kill-engine", 1, 7, "", "one of qp"),
        ("wqe=1: ", 1, 7, "", "give an action"),
        ("ä=1: kill-engine", 1, 1, "ä", "selector"),
        ("# ä\nseed=x", 2, 6, "x", "seed"),
    ] {
        let error = text.parse::<Script>().expect_err(text);
        let found = (error.line, error.column, error.word.as_str());
        assert_eq!(found, (line, column, word), "{text}: {error}");
        assert!(
            error.remedy.contains(part) || error.to_string().contains(part),
            "{text}: {error}"
        );
    }
}

#[test]
fn no_text_makes_the_parser_panic() {
    let pieces = [
        "wqe", "=", ":", ",", ";", "..", "..=", "#", "1", "0x", "é", " ", "\n", "fail", "/", "qp",
        "ms", "-", ".", "at", "\u{0}",
    ];
    let mut x = 1u64;
    for _ in 0..20_000 {
        let mut text = String::new();
        for _ in 0..x % 12 {
            x = x
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            text.push_str(pieces[(x >> 33) as usize % pieces.len()]);
        }
        x = x.wrapping_mul(6364136223846793005).wrapping_add(99);
        match text.parse::<Script>() {
            Ok(read) => assert_eq!(script(&read.to_string()), read, "{text}"),
            Err(e) => assert!(!e.to_string().is_empty()),
        }
    }
}

#[test]
fn places_come_in_order_and_each_nth_is_the_last_of_n() {
    let rule = |text: &str| script(text).rules.remove(0);
    let places = |text: &str| {
        let rule = rule(text);
        let mut at = 0;
        std::iter::from_fn(|| {
            let next = rule.next(at)?;
            at = next + 1;
            Some(next)
        })
        .take(4)
        .collect::<Vec<_>>()
    };
    assert_eq!(places("wqe=3: kill-engine"), [3]);
    assert_eq!(places("every=1000: kill-engine"), [999, 1999, 2999, 3999]);
    assert_eq!(places("wqe=10..31, every=10: kill-engine"), [19, 29]);
    assert_eq!(places("wqe=10..: kill-engine"), [10, 11, 12, 13]);
    assert_eq!(rule("wqe=10..: kill-engine").next(50), Some(50));
    assert_eq!(rule("every=10: kill-engine").next(u64::MAX - 3), None);
}

#[test]
fn counts_seeds_and_ranks() {
    let run = ScriptRun::new(script("n=2: fail=1; : fail=2"), 1, 0, None);
    let qpn = Qpn::new(0x42).expect("24 bits");
    assert_eq!([run.take(0), run.take(0), run.take(0)], [true, true, false]);
    run.fired(0, At::wqe(0, qpn, 7), String::new());
    let rules: Vec<_> = run.rules().iter().map(ToString::to_string).collect();
    assert_eq!(
        rules,
        [
            "fault script rule 1 (n=2: fail=1) fired at QP 0x000042 WQE 7; 2 times in all",
            "fault script rule 2 (: fail=2) has not fired"
        ]
    );
    // A flood keeps the first of each rule.
    for i in 0..1000 {
        assert!(run.take(1));
        let at = At {
            receive: true,
            ..At::wqe(0, qpn, i)
        };
        run.fired(1, at, "so".into());
    }
    assert!(run.firings().len() <= 256);
    assert_eq!(run.rules()[0].first.as_ref().and_then(|f| f.index), Some(7));
    assert!(
        run.rules()[1]
            .to_string()
            .contains("receive 0: so; 1000 times")
    );
}

#[test]
fn a_rule_for_another_rank_is_told_and_not_played() {
    let text = "rank=1: fail=1; : fail=2; rank=7: kill-process";
    let rules = |rank| {
        let run = ScriptRun::new(script(text), 1, rank, None);
        let played = [run.take(0), run.take(1), run.take(2)];
        let armed = run.rules_of(Qpn::new(1).expect("24 bits"), 0, false);
        assert_eq!(armed.len(), played.iter().filter(|p| **p).count());
        let lines: Vec<_> = run.rules().iter().map(ToString::to_string).collect();
        (played, lines)
    };
    let (played, lines) = rules(0);
    assert_eq!(played, [false, true, false]);
    // Its number is the same in every process.
    assert_eq!(
        lines[0],
        "fault script rule 1 (rank=1: fail=1) is for rank 1, and this is rank 0"
    );
    assert_eq!(rules(1).0, [true, true, false]);
}

#[test]
fn the_seed_decides_which_bit() {
    let with =
        |seed: u64| ScriptRun::new(script(&format!("seed={seed}; : corrupt-cqe")), 1, 0, None);
    let (a, b) = (with(1), with(2));
    let bits = |run: &ScriptRun| (0..64).map(|at| run.mask(0, None, at)).collect::<Vec<_>>();
    assert_eq!(bits(&a), bits(&with(1)));
    assert_ne!(bits(&a), bits(&b));
    assert!(bits(&a).iter().all(|m| m.count_ones() == 1));
    assert_eq!(a.mask(0, Some(0xf0), 3), 0xf0);
    // Byte 56 is the first of the mask: the CQE's last byte is the last.
    let mut words = [0; 8];
    corrupt(&mut words, 0xf0);
    assert_eq!(words[7].to_le_bytes(), [0, 0, 0, 0, 0, 0, 0, 0xf0]);
}

#[test]
fn the_page_has_every_word() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/faults.md");
    let page = std::fs::read_to_string(page).expect("docs/faults.md");
    let (_, rest) = page.split_once("<!-- grammar -->").expect("its grammar");
    let (grammar, _) = rest.split_once("<!-- end -->").expect("the end of it");
    for word in SELECTORS {
        assert!(grammar.contains(&format!("\"{word}=\"")), "{word}");
    }
    for word in ACTIONS {
        assert!(grammar.contains(&format!("\"{word}")), "{word}");
        assert!(
            page.contains(&format!("| `{word}`")),
            "{word} has no row of what it does"
        );
    }
    // And none that is not read: every quoted action begins a line.
    for line in grammar
        .lines()
        .filter(|l| l.starts_with("action") || l.starts_with("         | \""))
    {
        let word = line
            .split('"')
            .nth(1)
            .unwrap_or_default()
            .trim_end_matches('=');
        assert!(
            ACTIONS.contains(&word) || SELECTORS.contains(&word),
            "{word}"
        );
    }
}
