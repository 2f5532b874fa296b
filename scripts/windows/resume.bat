@echo off
rem Continues the newest run of a recipe, or a run.   resume.bat RECIPE [options]   resume.bat RUN_FOLDER
setlocal disabledelayedexpansion
set "LR_FILE=%~f0"
set "LR_DO=resume"
set LR_ARGS=%*
"%~dp0_run.bat"
