//! Records that are missing, and that are damaged.

use doorbell::report::{missing, server};

use crate::player::{Player, read};

/// Without a recorder it is the recorder that is missed, not a region.
#[test]
fn a_recorder_that_is_off_is_named() {
    let player = Player::start("word", "", "");
    let said = player.says();
    assert!(
        said.contains("as far as can be told without a flight recorder (DOORBELL_RECORD=off)"),
        "{said}"
    );
    let (report, said) = read(player.pid());
    assert!(
        !report.devices[0].recorded && !said.contains("no region"),
        "{said}"
    );
}

/// A record whose bytes were changed says so, and a letter of it that a terminal would obey is none.
#[test]
fn a_damaged_record_is_called_damaged() {
    let mut player = Player::start("per-slot", "", "");
    player.says();
    player.kill();
    let (_, path) = doorbell::report::records(player.pid()).remove(0);
    let whole = std::fs::read(&path).expect("a record");
    // Behind what makes it a record at all, and before the room for queue pairs that it never had.
    let end = whole.iter().rposition(|b| *b != 0).expect("not empty");
    let (from, len) = (64 * 8, end + 1);
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    };
    for count in [200, 200, 200, 20_000] {
        let mut bytes = whole.clone();
        for _ in 0..count {
            let at = from + next() as usize % (len - from);
            bytes[at] = next() as u8;
        }
        std::fs::write(&path, &bytes).expect("written");
        let mut reports = server::find_with_others(player.pid()).expect("it can be read");
        missing::name(&mut reports);
        let damage = reports[0].devices[0].damage.as_ref();
        assert!(damage.is_some(), "{count} bytes of {len}");
        let json = serde_json::to_value(&reports[0]).expect("JSON");
        assert!(!strange(&json), "{json}");
    }
    let mut bytes = whole;
    // The command line.
    bytes[32 * 8..][..5].copy_from_slice(b"\x1b[31m");
    std::fs::write(&path, &bytes).expect("written");
    let reports = server::find_with_others(player.pid()).expect("it can be read");
    let damage = reports[0].devices[0].damage.clone().unwrap_or_default();
    assert!(damage.contains("its command line is no text"), "{damage}");
    assert!(reports[0].command.starts_with("\u{fffd}[31m"));
}

/// Does a text hold what moves a cursor or changes a colour?
fn strange(value: &serde_json::Value) -> bool {
    use serde_json::Value;
    match value {
        Value::String(text) => text.chars().any(|c| c.is_control() && c != '\n'),
        Value::Array(all) => all.iter().any(strange),
        Value::Object(all) => all.values().any(strange),
        _ => false,
    }
}
