//! The language of fault scripts. `docs/faults.md` has its grammar and a test compares the two lists of words.

use core::fmt;
use core::str::FromStr;
use std::time::Duration;

use doorbell_wire::{Syndrome, Vendor};

use super::{Action, Place, QpSelect, Rule, Script};

/// Words before the colon.
pub(super) const SELECTORS: &[&str] = &["qp", "wqe", "recv", "every", "at", "n", "rank"];
/// Words behind it.
pub(super) const ACTIONS: &[&str] = &[
    "drop-doorbell",
    "delay-doorbell",
    "corrupt-cqe",
    "withhold-cqe",
    "fail",
    "stall-engine",
    "kill-engine",
    "kill-process",
    "kill-peer",
    "drop-link",
];
/// The place of a name in the list of actions.
pub(crate) fn action_number(name: &str) -> Option<usize> {
    ACTIONS.iter().position(|a| *a == name)
}

/// The action in that place.
pub(crate) fn action_named(number: usize) -> Option<&'static str> {
    ACTIONS.get(number).copied()
}

/// Longer scripts are a mistake.
const MOST_RULES: usize = 1000;

/// What is wrong with a fault script, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScriptError {
    /// Line, from 1.
    pub line: usize,
    /// Column in characters, from 1.
    pub column: usize,
    /// The word there.
    pub word: String,
    /// What to write instead.
    pub remedy: String,
}

impl fmt::Display for ScriptError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            line,
            column,
            word,
            remedy,
        } = self;
        write!(f, "fault script, line {line}, column {column}: ")?;
        match word.is_empty() {
            true => write!(f, "something is missing: {remedy}"),
            false => write!(f, "`{word}`: {remedy}"),
        }
    }
}

impl std::error::Error for ScriptError {}

type Result<T> = core::result::Result<T, ScriptError>;

/// A piece of a line that knows where it is.
#[derive(Clone, Copy)]
struct Word<'a> {
    text: &'a str,
    line: usize,
    column: usize,
}

impl<'a> Word<'a> {
    /// Bytes `from..to` of it.
    fn part(self, from: usize, to: usize) -> Self {
        Self {
            text: &self.text[from..to],
            column: self.column + self.text[..from].chars().count(),
            ..self
        }
    }

    fn trim(self) -> Self {
        let from = self.text.len() - self.text.trim_start().len();
        self.part(from, from + self.text.trim().len())
    }

    /// Before and behind the first `at`.
    fn split(self, at: char) -> Option<(Self, Self)> {
        let i = self.text.find(at)?;
        Some((
            self.part(0, i).trim(),
            self.part(i + at.len_utf8(), self.text.len()).trim(),
        ))
    }

    fn pieces(self, at: char) -> Vec<Self> {
        let (mut rest, mut all) = (self, Vec::new());
        while let Some(i) = rest.text.find(at) {
            all.push(rest.part(0, i).trim());
            rest = rest.part(i + at.len_utf8(), rest.text.len());
        }
        all.push(rest.trim());
        all
    }

    fn wrong<T>(self, remedy: impl Into<String>) -> Result<T> {
        Err(ScriptError {
            line: self.line,
            column: self.column,
            word: self.text.chars().take(40).collect(),
            remedy: remedy.into(),
        })
    }

    fn number(self, remedy: &str) -> Result<u64> {
        let digits = self.text.replace('_', "");
        let parsed = match digits.strip_prefix("0x") {
            Some(hex) => u64::from_str_radix(hex, 16),
            None => digits.parse(),
        };
        match parsed {
            Ok(n) if !digits.starts_with('+') && !digits.starts_with("0x+") => Ok(n),
            _ => self.wrong(remedy),
        }
    }

    fn duration(self) -> Result<Duration> {
        const REMEDY: &str = "give a time with its unit, such as 500us, 10ms or 1.5s";
        let unit = self.text.find(|c: char| c.is_ascii_alphabetic());
        let (number, unit) = self.text.split_at(unit.unwrap_or(self.text.len()));
        let scale = match unit {
            "ns" => 1e-9,
            "us" => 1e-6,
            "ms" => 1e-3,
            "s" => 1.0,
            "m" => 60.0,
            _ => return self.wrong(REMEDY),
        };
        let plain = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit() || b == b'.');
        match number.parse::<f64>() {
            // A day: nobody waits for longer, and nothing overflows.
            Ok(n) if plain && n * scale <= 86_400.0 => Ok(Duration::from_secs_f64(n * scale)),
            Ok(n) if plain && n.is_finite() => self.wrong("give a day (86400s) at most"),
            _ => self.wrong(REMEDY),
        }
    }
}

/// "give a, b or c", with the one that is nearest to what was written.
fn choice(what: &str, word: &str, of: &[&str]) -> String {
    let near = of
        .iter()
        .map(|o| (distance(word, o), *o))
        .min()
        .filter(|(d, o)| *d <= 2.max(o.len() / 4) && *d < o.len().min(word.len()));
    match near {
        Some((_, near)) => format!("no such {what}; did you mean {near}?"),
        None => format!("no such {what}; give one of {}", of.join(", ")),
    }
}

/// Letters to change, add or leave out.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().take(64).collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().take(64).enumerate() {
        let mut before = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let change = before + usize::from(x != *y);
            before = row[j + 1];
            row[j + 1] = change.min(before + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

impl FromStr for Script {
    type Err = ScriptError;

    fn from_str(text: &str) -> Result<Self> {
        let mut script = Self::default();
        for (i, line) in text.lines().enumerate() {
            if line.trim_start().starts_with('#') {
                continue;
            }
            let line = Word {
                text: line,
                line: i + 1,
                column: 1,
            };
            for rule in line.pieces(';') {
                if rule.text.is_empty() {
                    continue;
                }
                if let Some((name, value)) = rule.split('=')
                    && name.text == "seed"
                {
                    script.seed = value.number("give the seed as a number")?;
                    continue;
                }
                if script.rules.len() == MOST_RULES {
                    return rule.wrong(format!(
                        "a script has {MOST_RULES} rules at most: use ranges or every="
                    ));
                }
                script.rules.push(one(rule)?);
            }
        }
        Ok(script)
    }
}

/// What a rule says before its colon.
#[derive(Default)]
struct Selection {
    qp: Option<QpSelect>,
    place: Option<Place>,
    every: Option<u64>,
    at: Option<Duration>,
    times: Option<u64>,
    rank: Option<u32>,
}

fn one(rule: Word<'_>) -> Result<Rule> {
    let Some((before, after)) = rule.split(':') else {
        return rule.wrong("a rule is `where : action`, as in `wqe=1023: drop-doorbell`");
    };
    let mut found = Selection::default();
    for part in before.pieces(',') {
        if !before.text.is_empty() {
            select(part, &mut found)?;
        }
    }
    let action = action(after)?;
    if matches!(found.place, Some(Place::Receive(_))) && !action.is_of_cqes() {
        return after.wrong(
            "of receives, corrupt-cqe and withhold-cqe are possible; for the rest give wqe= of the sender",
        );
    }
    let timed = found.at.is_some() && found.place.is_none() && found.every.is_none();
    let place = match found.place {
        Some(place) => place,
        None if timed && found.qp.is_none() && action.is_of_engines() => Place::Engine,
        None => Place::Send(0..u64::MAX),
    };
    let name = after.split('=').map_or(after, |(name, _)| name);
    let value = after.split('=').map(|(_, value)| value.text);
    let text = match (before.text.is_empty(), value) {
        (true, None) => format!(": {}", name.text),
        (true, Some(value)) => format!(": {}={value}", name.text),
        (false, None) => format!("{}: {}", tidy(before), name.text),
        (false, Some(value)) => format!("{}: {}={value}", tidy(before), name.text),
    };
    Ok(Rule {
        text,
        qp: found.qp.unwrap_or(QpSelect::All),
        place,
        every: found.every.unwrap_or(1),
        at: found.at,
        times: found.times,
        rank: found.rank,
        action,
    })
}

fn tidy(before: Word<'_>) -> String {
    let parts: Vec<String> = before
        .pieces(',')
        .iter()
        .map(|p| match p.split('=') {
            Some((k, v)) => format!("{}={}", k.text, v.text),
            None => p.text.to_owned(),
        })
        .collect();
    parts.join(", ")
}

fn select(part: Word<'_>, found: &mut Selection) -> Result<()> {
    if part.text.is_empty() {
        return part.wrong(format!("give one of {}", SELECTORS.join(", ")));
    }
    let Some((name, value)) = part.split('=') else {
        return match SELECTORS.contains(&part.text) {
            true => part.wrong(format!("give a value, as in {}=1", part.text)),
            false => part.wrong(choice("selector", part.text, SELECTORS)),
        };
    };
    let twice = match name.text {
        "qp" => {
            let qp = match (value.text, value.text.strip_prefix('#')) {
                ("*", _) => QpSelect::All,
                (_, Some(nth)) => QpSelect::Nth(
                    value
                        .part(value.text.len() - nth.len(), value.text.len())
                        .number(
                            "give #0 for the first queue pair that is made, #1 for the second",
                        )?,
                ),
                _ => match value
                    .number("give *, a number such as 0x42, or #0 for the first that is made")?
                {
                    n @ 1..0x100_0000 => QpSelect::Number(n as u32),
                    _ => return value.wrong("queue pair numbers have 24 bits"),
                },
            };
            found.qp.replace(qp).is_some()
        }
        "wqe" => found.place.replace(Place::Send(range(value)?)).is_some(),
        "recv" => found.place.replace(Place::Receive(range(value)?)).is_some(),
        "every" => match value.number("give a count, from 1")? {
            0 => return value.wrong("give a count, from 1"),
            n => found.every.replace(n).is_some(),
        },
        "at" => found.at.replace(value.duration()?).is_some(),
        "n" => match value.number("give how often at most, from 1")? {
            0 => return value.wrong("give how often at most, from 1"),
            n => found.times.replace(n).is_some(),
        },
        "rank" => match u32::try_from(value.number("give the rank of a process, from 0")?) {
            Ok(rank) => found.rank.replace(rank).is_some(),
            Err(_) => return value.wrong("give the rank of a process, from 0"),
        },
        other => return name.wrong(choice("selector", other, SELECTORS)),
    };
    match twice {
        true => part.wrong("said twice (wqe and recv exclude each other); write a second rule"),
        false => Ok(()),
    }
}

/// `N`, `N..`, `N..M` or `N..=M`.
fn range(value: Word<'_>) -> Result<core::ops::Range<u64>> {
    const REMEDY: &str =
        "give an index such as 1023, or a range such as 1000..2000, 1000..=1999 or 1000..";
    let Some(dots) = value.text.find("..") else {
        let n = value.number(REMEDY)?;
        return match n.checked_add(1) {
            Some(end) => Ok(n..end),
            None => value.wrong(REMEDY),
        };
    };
    let from = match value.part(0, dots) {
        none if none.text.is_empty() => 0,
        some => some.trim().number(REMEDY)?,
    };
    let mut rest = value.part(dots + 2, value.text.len());
    let inclusive = rest.text.starts_with('=');
    if inclusive {
        rest = rest.part(1, rest.text.len());
    }
    let rest = rest.trim();
    let to = match (rest.text.is_empty(), inclusive) {
        (true, false) => u64::MAX,
        _ => rest.number(REMEDY)?.saturating_add(u64::from(inclusive)),
    };
    match from < to {
        true => Ok(from..to),
        false => value.wrong("the range is empty: its end is not above its beginning"),
    }
}

fn action(after: Word<'_>) -> Result<Action> {
    if after.text.is_empty() {
        return after.wrong(format!("give an action: {}", ACTIONS.join(", ")));
    }
    let (name, value) = match after.split('=') {
        Some((name, value)) => (name, Some(value)),
        None => (after, None),
    };
    if !ACTIONS.contains(&name.text) {
        return name.wrong(choice("action", name.text, ACTIONS));
    }
    let time = |value: Option<Word<'_>>| match value {
        Some(value) => value.duration(),
        None => after.wrong(format!("say how long, as in {}=10ms", name.text)),
    };
    let maybe = |value: Option<Word<'_>>| value.map(Word::duration).transpose();
    let nothing = |action| match value {
        None => Ok(action),
        Some(value) => value.wrong(format!("{} takes no value", name.text)),
    };
    match name.text {
        "drop-doorbell" => nothing(Action::DropDoorbell),
        "delay-doorbell" => Ok(Action::DelayDoorbell(time(value)?)),
        "corrupt-cqe" => {
            const REMEDY: &str =
                "give the bits to turn over in the CQE's last eight bytes, byte 56 first, such as 0x00000000000000f0";
            let mask = value.map(|v| v.number(REMEDY)).transpose()?;
            match (mask, value) {
                (Some(0), Some(value)) => value.wrong(REMEDY),
                _ => Ok(Action::CorruptCqe(mask)),
            }
        }
        "withhold-cqe" => Ok(Action::WithholdCqe(maybe(value)?)),
        "fail" => match value {
            Some(value) => syndromes(value),
            None => after.wrong(
                "say with which syndrome, as in fail=REMOTE_ACCESS or fail=0x13/0x89 (syndrome/vendor)",
            ),
        },
        "stall-engine" => Ok(Action::StallEngine(time(value)?)),
        "kill-engine" => nothing(Action::KillEngine),
        "kill-process" => nothing(Action::KillProcess),
        "kill-peer" => nothing(Action::KillPeer),
        _ => Ok(Action::DropLink(maybe(value)?)),
    }
}

fn syndromes(value: Word<'_>) -> Result<Action> {
    let (first, second) = match value.split('/') {
        Some((first, second)) => (first, Some(second)),
        None => (value, None),
    };
    let names: Vec<&str> = Syndrome::ALL
        .iter()
        .skip(1)
        .filter_map(|s| s.name())
        .collect();
    let syndrome = match Syndrome::ALL.iter().find(|s| s.name() == Some(first.text)) {
        Some(s) => *s,
        None => match first.number("") {
            Ok(n) if n <= 0xff => Syndrome(n as u8),
            _ => {
                return first.wrong(choice(
                    "syndrome (or a byte such as 0x13)",
                    first.text,
                    &names,
                ));
            }
        },
    };
    if syndrome == Syndrome::NONE {
        return first.wrong("0 is no error: give another syndrome, such as REMOTE_ACCESS");
    }
    let vendor = match second {
        None => Vendor::NONE,
        Some(second) => match Vendor::ALL.iter().find(|v| v.name() == Some(second.text)) {
            Some(v) => *v,
            None => match second.number("") {
                Ok(n) if n <= 0xff => Vendor(n as u8),
                _ => {
                    let names: Vec<&str> = Vendor::ALL.iter().filter_map(|v| v.name()).collect();
                    return second.wrong(choice(
                        "vendor syndrome (or a byte such as 0x89)",
                        second.text,
                        &names,
                    ));
                }
            },
        },
    };
    Ok(Action::Fail(syndrome, vendor))
}
