//! How an explanation looks: stages under a rule, fields in columns, checks with their outcome, 80 columns.
//! Colours only where somebody looks at a terminal that takes them (`NO_COLOR` is respected).

use std::io::{self, Write};

use super::checks::Check;
use super::fields::{Field, Segment};
use crate::table;

const WIDTH: usize = 80;
/// Columns before what a field says: byte numbers, up to eight bytes in hex, its name.
const BYTES: usize = 5;
const HEX: usize = 23;
const NAME: usize = 11;
const BEFORE: usize = 2 + BYTES + 2 + HEX + 2 + NAME + 2;

/// How a piece of text is meant.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Tone {
    Strong,
    Faint,
    Good,
    Bad,
    /// What differs from the run before.
    Changed,
}

/// Where it is written.
pub(super) struct Page<'a> {
    out: &'a mut dyn Write,
    styled: bool,
}

impl<'a> Page<'a> {
    pub(super) fn new(out: &'a mut dyn Write, styled: bool) -> Self {
        Self { out, styled }
    }

    fn tone(&self, text: &str, tone: Tone) -> String {
        if !self.styled || text.is_empty() {
            return text.to_owned();
        }
        let code = match tone {
            Tone::Strong => "1",
            Tone::Faint => "2",
            Tone::Good => "32",
            Tone::Bad => "1;31",
            Tone::Changed => "1;33",
        };
        format!("\x1b[{code}m{text}\x1b[0m")
    }

    /// A heading over a rule.
    pub(super) fn heading(&mut self, text: &str) -> io::Result<()> {
        let (head, rule) = (
            self.tone(text, Tone::Strong),
            self.tone(&"─".repeat(WIDTH), Tone::Faint),
        );
        writeln!(self.out, "{head}\n{rule}")
    }

    /// The heading of a stage.
    pub(super) fn stage(&mut self, number: u32, text: &str) -> io::Result<()> {
        let head = self.tone(&format!("{number}. {text}"), Tone::Strong);
        writeln!(self.out, "\n{head}")
    }

    /// Wrapped text.
    pub(super) fn text(&mut self, text: &str) -> io::Result<()> {
        for line in table::wrap(text, crate::out::columns() - 3) {
            writeln!(self.out, "   {line}")?;
        }
        Ok(())
    }

    pub(super) fn gap(&mut self) -> io::Result<()> {
        writeln!(self.out)
    }

    /// `name  value` lines.
    pub(super) fn facts(&mut self, pairs: &[(&str, String)]) -> io::Result<()> {
        let pairs: Vec<_> = pairs
            .iter()
            .map(|(name, value)| (format!(" {name}"), value.clone()))
            .collect();
        table::facts(self.out, &pairs)
    }

    /// Sixteen bytes a line, each line with the name of the segment it is; bytes that differ from `before` stand out.
    pub(super) fn hex(
        &mut self,
        bytes: &[u8],
        before: Option<&[u8]>,
        segments: &[Segment],
    ) -> io::Result<()> {
        for (row, line) in bytes.chunks(16).enumerate() {
            let mut text = String::new();
            for (i, byte) in line.iter().enumerate() {
                let changed = before
                    .and_then(|b| b.get(16 * row + i))
                    .is_some_and(|b| b != byte);
                let byte = format!("{byte:02x}");
                let byte = if changed {
                    self.tone(&byte, Tone::Changed)
                } else {
                    byte
                };
                text.push_str(if i == 8 { "  " } else { " " });
                text.push_str(&byte);
            }
            let name = segments
                .iter()
                .find(|s| s.bytes.contains(&(16 * row)))
                .map_or("not part of it", |s| s.name);
            let at = self.tone(&format!("{:02x}", 16 * row), Tone::Faint);
            let name = self.tone(name, Tone::Faint);
            writeln!(self.out, "   {at} {text}   {name}")?;
        }
        Ok(())
    }

    /// Every field: where, its bytes, its name, what it says.
    pub(super) fn fields(&mut self, bytes: &[u8], segments: &[Segment]) -> io::Result<()> {
        for segment in segments {
            let name = self.tone(segment.name, Tone::Strong);
            writeln!(self.out, "\n  {name}")?;
            for field in &segment.fields {
                self.field(bytes, field)?;
            }
        }
        Ok(())
    }

    /// Fields without the heading of their segment.
    pub(super) fn field(&mut self, bytes: &[u8], field: &Field) -> io::Result<()> {
        let (first, last) = (field.bytes.start, field.bytes.end - 1);
        let at = if first == last {
            first.to_string()
        } else {
            format!("{first}-{last}")
        };
        let says = table::wrap(&field.says, WIDTH - BEFORE);
        // A field longer than eight bytes goes on in the next line.
        let chunks: Vec<&[u8]> = bytes[field.bytes.clone()].chunks(8).collect();
        for i in 0..says.len().max(chunks.len()) {
            let hex = chunks.get(i).map_or(String::new(), |c| spaced(c));
            let (at, name) = if i == 0 { (&*at, field.name) } else { ("", "") };
            let says = says.get(i).map_or("", |s| s);
            let at = self.tone(&format!("{at:>BYTES$}"), Tone::Faint);
            let hex = format!("{hex:HEX$}");
            let hex = if field.wrong {
                self.tone(&hex, Tone::Changed)
            } else {
                hex
            };
            let line = format!("  {at}  {hex}  {name:NAME$}  {says}");
            writeln!(self.out, "{}", line.trim_end())?;
        }
        Ok(())
    }

    /// Checks in order, each with what was found.
    pub(super) fn checks(&mut self, checks: &[Check]) -> io::Result<()> {
        for check in checks {
            let (word, tone) = match check.ok {
                Some(true) => ("ok", Tone::Good),
                Some(false) => ("NO", Tone::Bad),
                None => ("->", Tone::Strong),
            };
            let word = self.tone(word, tone);
            for (i, line) in table::wrap(&check.text, crate::out::columns() - 7)
                .iter()
                .enumerate()
            {
                let mark = if i == 0 { &*word } else { "  " };
                writeln!(self.out, "   {mark}  {line}")?;
            }
        }
        Ok(())
    }
}

/// `01 02 03`.
pub(super) fn spaced(bytes: &[u8]) -> String {
    let bytes: Vec<String> = bytes.iter().map(|b| format!("{b:02x}")).collect();
    bytes.join(" ")
}
