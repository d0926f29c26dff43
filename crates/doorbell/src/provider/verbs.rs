//! RDMA devices for the software HCA: which one a setting means, and what a connection over it is made of.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use doorbell_hca::verbs::library::{Context, GidEntry, Verbs, VerbsError};
use doorbell_hca::verbs::{DeviceKeys, VerbsConfig, VerbsPort, VerbsTarget as Target};
use doorbell_hca::{Hca, HcaError};

use crate::config::Settings;
use crate::connect::VerbsTarget;
use crate::mr::RemoteMr;
use crate::{Error, Result, Source};

/// Which device, and how connections are made; what is open.
pub(super) struct VerbsSettings {
    settings: Settings,
    library: OnceLock<Verbs>,
    open: Mutex<Option<Arc<VerbsPort>>>,
}

impl VerbsSettings {
    pub(super) fn new(settings: &Settings) -> Self {
        Self {
            settings: settings.clone(),
            library: OnceLock::new(),
            open: Mutex::default(),
        }
    }

    fn library(&self) -> Result<&Verbs> {
        if let Some(library) = self.library.get() {
            return Ok(library);
        }
        let library = Verbs::load().map_err(HcaError::from)?;
        Ok(self.library.get_or_init(|| library))
    }

    /// The device's port; opens it.
    pub(super) fn port(&self, hca: &Hca) -> Result<Arc<VerbsPort>> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(port) = open.as_ref().filter(|p| !p.is_gone()) {
            return Ok(Arc::clone(port));
        }
        let library = self.library()?;
        let port = self
            .config(library)
            .and_then(|c| Ok(hca.open_verbs(library, &c)?));
        let port = port.map_err(|e| self.settings.variable_fails("verbs", &e).unwrap_or(e))?;
        *open = Some(Arc::clone(&port));
        Ok(port)
    }

    fn config(&self, library: &Verbs) -> Result<VerbsConfig> {
        let mut config = port(&self.settings.verbs)?;
        config.mtu = self.settings.roce_mtu.unwrap_or(4096);
        if config.device == "auto" {
            config.device = choose(library, &config).map_err(HcaError::from)?;
        }
        Ok(config)
    }
}

/// What a setting names.
pub(crate) fn port(text: &str) -> Result<VerbsConfig> {
    text.parse().map_err(|remedy| Error::Setting {
        name: "verbs",
        value: text.to_owned(),
        origin: Source::Argument,
        remedy,
    })
}

/// The device whose port has the address that is preferred, else the first that can be used.
fn choose(library: &Verbs, wanted: &VerbsConfig) -> Result<String, VerbsError> {
    let (mut first, mut refused) = (None, None);
    for device in library.devices()? {
        match gids(library, &device.name, wanted.port) {
            Ok(gids) if wanted.ip.is_some() && gids.iter().any(|g| g.ip() == wanted.ip) => {
                return Ok(device.name);
            }
            Ok(_) => first = first.or(Some(device.name)),
            Err(e) => refused = refused.or(Some(e)),
        }
    }
    // Why the first is of no use says more than that there is none.
    first.ok_or_else(|| {
        refused.unwrap_or(VerbsError::NoDevice {
            name: String::new(),
            found: Vec::new(),
        })
    })
}

/// The addresses of a port that can be used.
fn gids(library: &Verbs, device: &str, port: u8) -> Result<Vec<GidEntry>, VerbsError> {
    let context = Context::open(library, device)?;
    context.connectable()?;
    context.active_port(port)?;
    context.gids(port)
}

/// A connection as the engine makes it. `psn` is the first number that this side sends.
pub(super) fn target(settings: &VerbsSettings, target: &VerbsTarget, psn: u32) -> Target {
    Target {
        peer: target.peer,
        sq_psn: psn,
        rq_psn: target.psn,
        timeout: settings.settings.roce_timeout,
        // soft-RoCE takes 7 for "without end", as all do where no receive is posted; its peers that are gone would never be missed.
        retry: settings.settings.roce_retry.min(6),
        rnr_retry: 7,
        min_rnr_timer: 12,
    }
}

/// A region as peers name it over the device.
pub(super) fn remote(keys: DeviceKeys, len: usize) -> RemoteMr {
    RemoteMr {
        addr: keys.base,
        len: len as u64,
        key: keys.rkey,
    }
}
