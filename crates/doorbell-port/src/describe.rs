//! What a port says of itself.

use std::fmt;

/// What was chosen, why, and what is guaranteed; for `doorbell info`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Description {
    /// One line.
    pub title: String,
    /// Name and value of each choice, with its reason.
    pub choices: Vec<(&'static str, String)>,
    /// What a user can rely on, a sentence each, limits included.
    pub guarantees: Vec<String>,
}

impl fmt::Display for Description {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.title)?;
        for (name, value) in &self.choices {
            writeln!(f, "  {name:<10} {value}")?;
        }
        for sentence in &self.guarantees {
            writeln!(f, "  - {sentence}")?;
        }
        Ok(())
    }
}
